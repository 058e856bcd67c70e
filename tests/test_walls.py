"""The import walls: a room imports only rooms below it, and the rooms without jax really are without jax.

So an environment author's tests start in milliseconds, an environment's process can never grab an accelerator, and a reader can stop at
any layer.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "burnish"

LAYERS = [
    # without jax
    ["burnish", "burnish.types", "burnish.faults", "burnish.observe.trace", "burnish.observe.metrics", "burnish.rollout.engine"],
    ["burnish.config", "burnish.data", "burnish.text", "burnish.rewards", "burnish.rl.advantages", "burnish.rl.batch_plan"]
    + ["burnish.agentic.processes", "burnish.agentic.sandbox", "burnish.agentic.sandbox_process", "burnish.agentic.worker_process"]
    + ["burnish.rl.credit"]
    + [
        "burnish.rl.handoff",
        "burnish.rl.layout",
        "burnish.rl.wire",
        "burnish.rl.reports",
        "burnish.rollout.draft",
        "burnish.rollout.scripted",
        "burnish.rollout.slotted",
    ]
    + ["burnish.rollout.remote", "burnish.rollout.setup", "burnish.rollout.server", "burnish.rollout.vllm", "burnish.rollout.sglang"]
    + ["burnish.rollout.burnish"]
    + ["burnish.observe.run_folder", "burnish.observe.sinks", "burnish.observe.transcripts", "burnish.observe.display"]
    + [
        "burnish.observe.trace_writer",
        "burnish.observe.trace_reader",
        "burnish.observe.run_files",
        "burnish.observe.panel",
        "burnish.observe.bottlenecks",
        "burnish.observe.health",
    ]
    + ["burnish.observe.report", "burnish.observe.trackers", "burnish.observe.telemetry"],
    ["burnish.agentic", "burnish.rl.evaluation", "burnish.rl.fleet", "burnish.rl.replay"],
    # with jax
    [
        "burnish.pytree",
        "burnish.observe.devices",
        "burnish.models",
        "burnish.rl.batch",
        "burnish.rl.losses",
        "burnish.rl.aggregate",
        "burnish.rl.algorithms",
    ]
    + ["burnish.rl.kl", "burnish.rl.off_policy", "burnish.rl.overlap", "burnish.rl.placement"],
    ["burnish.train", "burnish.sync", "burnish.checkpoint", "burnish.rollout.native", "burnish.rollout.recomputing"],
    [
        "burnish.rl.anchor",
        "burnish.rl.cluster",
        "burnish.rl.critic",
        "burnish.rl.distributed",
        "burnish.rl.engines",
        "burnish.rl.forecast",
        "burnish.rl.learner",
        "burnish.rl.learners",
        "burnish.rl.pathways",
        "burnish.rl.producer",
        "burnish.rl.progress",
        "burnish.rl.prompts",
        "burnish.rl.publish",
        "burnish.rl.reward_model",
        "burnish.rl.reference",
        "burnish.rl.scoring",
        "burnish.rl.sites",
        "burnish.rl.speed",
        "burnish.rl.vocabulary",
        "burnish.train.trainers",
        "burnish.testing",
    ],
    ["burnish.cli", "burnish.__main__"],
]
"""From the bottom up. A module belongs to the longest name that it starts with; it may import its own layer and those below."""

SHARED_FOLDERS = {"burnish.observe", "burnish.rl", "burnish.rollout"}
"""Folders whose files stand in different layers: their `__init__` is imported by all of them and so belongs to the lowest."""

FIRST_WITH_JAX = 3
JAX = {"jax", "jaxlib", "optax", "orbax", "chex", "flax", "jaxtyping"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("burnish", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> int:
    """The layer of a module, found by the longest prefix in the table."""
    name = module
    while name not in SHARED_FOLDERS:
        for index, rooms in enumerate(LAYERS):
            if name in rooms and (name != "burnish" or module == "burnish"):
                return index
        if "." not in name:
            break
        name = name.rpartition(".")[0]
    assert module in SHARED_FOLDERS, f"{module} belongs to no room: say in tests/test_walls.py in which layer it stands"
    return 0


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, at any depth of its code, with the line; what only a type checker sees is left out."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in MODULES else node.module
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def offences(module: str, path: Path) -> list[str]:
    """What `module` imports although it may not."""
    own, found = layer(module), []
    for line, name in imports(path):
        if name.split(".")[0] == "burnish" and layer(name) > own:
            found.append(f"{path.name}:{line}: {module} (layer {own}) imports {name} (layer {layer(name)})")
        if name.split(".")[0] in JAX and own < FIRST_WITH_JAX:
            found.append(f"{path.name}:{line}: {module} must stay without jax and imports {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_is_below_it(module: str) -> None:
    assert offences(module, MODULES[module]) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("burnish.data.stream", "import jax.numpy as jnp"),
        ("burnish.agentic.agents", "def f():\n    from optax import adamw"),
        ("burnish.rewards.manager", "from burnish.agentic import tools"),
        ("burnish.types", "from burnish.config.schema import Config"),
        ("burnish.rl.losses", "from burnish.rl import learner"),
        ("burnish.train.step", "if True:\n    import burnish.cli.main"),
    ],
)
def test_the_check_sees_an_offence(module: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "planted.py"
    path.write_text(code)
    for name in ("burnish.rl.learner", "burnish.agentic.tools"):
        monkeypatch.setitem(MODULES, name, path)
    assert len(offences(module, path)) == 1


def test_the_check_lets_types_and_lower_layers_pass(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\nfrom burnish.types import Group\nimport numpy\n")
    assert offences("burnish.agentic.agents", path) == []


def test_rooms_without_jax_are_imported_without_jax() -> None:
    rooms = [module for module in MODULES if layer(module) < FIRST_WITH_JAX]
    code = f"import importlib, sys\nfor room in {rooms}:\n    importlib.import_module(room)\n    assert 'jax' not in sys.modules, room"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


def test_a_room_of_a_shared_folder_must_be_in_the_table() -> None:
    assert layer("burnish.rl") == 0 and layer("burnish.rollout.native.engine") == 4 and layer("burnish.agentic.tools") == 2
    with pytest.raises(AssertionError, match="belongs to no room"):
        layer("burnish.rl.surprise")
    with pytest.raises(AssertionError, match="belongs to no room"):
        layer("burnish.surprise")
