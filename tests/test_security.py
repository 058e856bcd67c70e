"""What comes from outside is data: it is read, or refused at little cost, and never obeyed. docs/security.md says from whom."""

import ast
import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import ConfigError, UserError
from burnish.config.loader import load_config
from burnish.config.resolve import resolve
from burnish.models import weights
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.text.chat import ChatTemplate
from burnish.text.tokenizer import Tokenizer
from tests.listening import listeners
from tests.rl.runs import digits_reward, make_learner

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def at_little_cost(seconds: float = 1.0) -> Iterator[None]:
    """So much processor time at most (not of the clock: the machine may be busy), and 100 MiB more than were ever held before."""
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begun < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


# -------------------------------------------------------------------------------------------------------------- what isn't in the code


RUNS_TEXT = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "yaml.unsafe_load",
    "marshal.loads",
}
ALLOWED = {"agentic/worker_process.py": {"pickle.loads"}}
"""A worker reads what its parent has sent it, over a pair of sockets that nobody else holds."""


def runs_text(path: Path) -> set[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = {ast.unparse(call.func) for call in calls} & RUNS_TEXT
    return named | {word.arg for call in calls for word in call.keywords if word.arg in ("trust_remote_code", "shell", "allow_pickle")}


def test_b135_b137_b143_nothing_evaluates_unpickles_or_asks_a_shell() -> None:
    modules = {path.relative_to(ROOT / "burnish").as_posix(): runs_text(path) for path in (ROOT / "burnish").rglob("*.py")}
    assert {name: found for name, found in modules.items() if found} == ALLOWED


# -------------------------------------------------------------------------------------------------------------------------- model files


class Canary:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "cut in its length": b"\x08\x00\x00",
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 90 << 20) + b"{}",
    "a header that isn't JSON": tensors(b"\xff" * 64),
    "a header nested without end": tensors(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "data beyond the file's end": tensors({"model.norm.weight": entry(0, 1 << 40)}, b"\0" * 8),
    "tensors upon each other": tensors({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12),
    "a shape that isn't its data's": tensors({"a": entry(0, 8, [1 << 31, 1 << 31])}, b"\0" * 8),
    "numbers of no known kind": tensors({"a": entry(0, 8, dtype="PYOBJ")}, b"\0" * 8),
}


@pytest.mark.parametrize("what", [*DAMAGED, "a pickle"])
def test_b123_a_damaged_model_file_is_refused_at_little_cost(tmp_path: Path, what: str) -> None:
    write_tiny_model(tmp_path)
    canary = tmp_path / "canary"
    data = pickle.dumps(Canary(canary)) if what == "a pickle" else DAMAGED[what]
    (tmp_path / "model.safetensors").write_bytes(data)
    with at_little_cost(), pytest.raises(UserError, match="can't be read as safetensors|don't fit"):
        weights.load(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"hidden_size": 10**12}),
        ("config.json", {"vocab_size": -1}),
        ("config.json", {"intermediate_size": "many"}),
        ("model.safetensors.index.json", {"weight_map": {"a": "../../secrets/model.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}),
        ("model.safetensors.index.json", {"weight_map": ["a"]}),
        ("config.json", "[" * 100_000),
        ("model.safetensors.index.json", "[1]"),
        ("tokenizer_config.json", "[" * 100_000),
    ],
)
def test_b123_a_model_folders_words_are_checked_at_little_cost(tmp_path: Path, file: str, change: Any) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(change if isinstance(change, str) else json.dumps(before | change))
    with at_little_cost(), pytest.raises(UserError, match=file.replace(".", r"\.")):
        weights.load(tmp_path)
        Tokenizer.load(tmp_path)


MODEST = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir('canary') }}",
        "{{ self.__init__.__globals__ }}{{ lipsum.__globals__['os'].mkdir('canary') }}",
        "{% for _ in range(999999999) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template + MODEST)
    tokenizer, says = Tokenizer.load(tmp_path / "model"), [{"role": "user", "content": "1"}]
    with at_little_cost(), pytest.raises(Exception, match="."):
        ChatTemplate.load(tmp_path / "model", tokenizer).encode(says)
    (tmp_path / "model" / "chat_template.jinja").write_text(MODEST)
    assert ChatTemplate.load(tmp_path / "model", tokenizer).encode(says)
    assert not (tmp_path / "canary").exists()


# ------------------------------------------------------------------------------------------------------------------------ configurations


def bomb(levels: int, width: int) -> str:
    return "k0: &a0 x\n" + "\n".join(f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: !!python/object/apply:os.mkdir [canary]}",
        "run: {seed: 1}\nrun: {seed: 2}\n",
        bomb(30, 9),
        "a: &a [*a]\n",
        "a: " + "{a: " * 5000,
        "#" * (2 << 20),
        "extends: /dev/zero\n",
    ],
    ids=["object", "twice", "bomb", "itself", "deep", "large", "endless"],
)
def test_r51_a_poisoned_configuration_is_refused_at_little_cost(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with at_little_cost(3.0), pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml", [], {})
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["__import__('os').mkdir('canary')", "os:mkdir('canary')", "os.mkdir;x", "../x.py:f", "canary.py:f()"])
def test_a_name_in_a_configuration_is_looked_up_and_not_evaluated(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        resolve(name, kind="reward", base=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------------- listeners


@pytest.mark.slow
def test_r49_a_run_listens_nowhere(tmp_path: Path) -> None:
    """Asked of the kernel in the middle of a run, for it and all of its processes; the last one shows that it would be seen."""
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    seen = []

    def looks(completions: list[str], answer: list[str]) -> list[float]:
        seen.append(listeners(os.getpid()) - before)
        return digits_reward(completions, answer)

    before = listeners(os.getpid())
    make_learner(tmp_path, reward=looks, training={"max_steps": 1}).train()
    assert seen and all(not found for found in seen)
