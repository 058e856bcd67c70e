"""Where roles live, told before anything is loaded: the placements of docs/placement.md, their bytes, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, LoraConfig
from burnish.models.config import ModelConfig, RopeConfig
from burnish.rl.placement import Place, Placement, Role, placement
from burnish.testing.tiny import tiny_config

DOCS = Path(__file__).resolve().parents[2] / "docs" / "placement.md"
LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_width=14_336,
    rope=RopeConfig(500_000.0),
    max_positions=131_072,
)
MATRICES = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336
"""Numbers in the matrices of a layer."""
WHOLE = 4 * (32 * (MATRICES + 2 * 4096) + 2 * 128_256 * 4096 + 4096)
"""Bytes of every weight in float32: 8.03 billion numbers."""
ENGINE = 32 * (2 * MATRICES + 4 * 2 * 4096) + 4 * (128_256 * 4096 + 4096) + 2 * 128_256 * 4096
"""Bytes in the engine's layout: matrices and head in bfloat16, norms and embedding in float32."""
LORA = LoraConfig(rank=16, targets=("q", "v"))
PAIRS = 4 * 32 * 16 * (4096 + 4096 + 4096 + 1024)


def place(options: Any, *, num_devices: int = 8, **others: Any) -> Placement:
    config = ClusterConfig.model_validate(options)
    return placement(config, num_devices=num_devices, **{"model": LLAMA_8B, "precision": "bf16", "needs_reference": True, **others})


def told(found: Placement) -> dict[str, tuple[str, str, int]]:
    return {str(p.role): (str(p.place), p.holding, p.bytes_per_device) for p in found.roles.values()}


COLOCATED: Any = {"actor": {"axes": {"data": 2, "tp": 2}}}
SAME_DEVICES: Any = {"actor": {"axes": {"fsdp": 4}}}
SPLIT: Any = {
    "actor": {"axes": {"fsdp": 4}},
    "rollout": {"axes": {"tp": 2}},
    "reference": {"devices": "6-7", "axes": {"fsdp": 2}},
}
SHARED: Any = {"actor": {"devices": 1}}


def test_colocated_roles_of_equal_meshes_hold_copies_cut_alike() -> None:
    assert told(place(COLOCATED)) == {
        "actor": ("0-3 (data 2, tp 2)", "own", (WHOLE - 4 * 4096 * 65) // 2 + 4 * 4096 * 65),  # norms aren't cut by tp
        "rollout": ("0-3 (data 2, tp 2)", "copy", (ENGINE - 4 * 4096 * 65) // 2 + 4 * 4096 * 65),
        "reference": ("0-3 (data 2, tp 2)", "copy", (WHOLE - 4 * 4096 * 65) // 2 + 4 * 4096 * 65),
    }


def test_beside_fsdp_the_engine_has_axes_of_its_own_on_the_same_devices() -> None:
    found = place(SAME_DEVICES)
    assert told(found) == {
        "actor": ("0-3 (fsdp 4)", "own", WHOLE // 4),
        "rollout": ("0-3 (tp 4)", "resharded", (ENGINE - 4 * 4096 * 65) // 4 + 4 * 4096 * 65),
        "reference": ("0-3 (fsdp 4)", "copy", WHOLE // 4),
    }
    assert "by default, since fsdp 4 would gather every weight for every token" in found[Role.ROLLOUT].why
    explicit = place(SAME_DEVICES | {"rollout": {"same_devices_as": "actor"}})
    assert told(explicit) == told(found) and "by default" not in explicit[Role.ROLLOUT].why


def test_split_roles_have_devices_of_their_own() -> None:
    assert told(place(SPLIT)) == {
        "actor": ("0-3 (fsdp 4)", "own", WHOLE // 4),
        "rollout": ("4,5 (tp 2)", "elsewhere", (ENGINE - 4 * 4096 * 65) // 2 + 4 * 4096 * 65),
        "reference": ("6,7 (fsdp 2)", "elsewhere", WHOLE // 2),
    }


def test_under_lora_the_reference_and_the_engines_outer_leaves_are_the_actors() -> None:
    found = place(SHARED, lora=LORA, num_devices=1)
    assert told(found) == {
        "actor": ("0", "own", WHOLE + PAIRS),
        "rollout": ("0", "copy", ENGINE - 4 * (128_256 * 4096 + 4096) + PAIRS),
        "reference": ("0", "shared", 0),
    }
    apart = told(place(SHARED | {"reference": {"devices": 1}, "rollout": {"devices": [2]}}, lora=LORA))
    assert apart["reference"] == ("1", "elsewhere", WHOLE)
    assert apart["rollout"] == ("2", "elsewhere", ENGINE + PAIRS + 4 * 32 * (4096 * 4096 + 4096 * 1024))  # and what it merges into


def test_the_page_shows_what_the_function_says() -> None:
    shown = re.findall(r"```text\n(role .*?)\n```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    told = [
        place(COLOCATED),
        place(COLOCATED, lent=True, precision="f32"),
        place(SAME_DEVICES),
        place(SPLIT),
        place(SHARED, lora=LORA, num_devices=1),
    ]
    assert shown == ["\n".join(line.rstrip() for line in found.table().splitlines()) for found in told]


def test_a_critic_and_a_reward_model_have_weights_of_their_own() -> None:
    small = tiny_config(width=16)
    found = place({"critic": {"devices": [2, 3]}, "reward": {"same_as": "critic"}}, critic=small, reward=small, reward_weight_bytes=2)
    critic, reward = found[Role.CRITIC], found[Role.REWARD]
    assert critic.place == reward.place == Place((2, 3), (("data", 2),)) and critic.bytes_per_device == 2 * reward.bytes_per_device > 0
    assert critic.total_bytes == 2 * critic.bytes_per_device and "2,3 (data 2)" in found.table()


@pytest.mark.parametrize(
    ("options", "devices"),
    {
        "named devices go first, whoever names them": (
            {"actor": {"axes": {"fsdp": 2}}, "rollout": {"devices": [0, 1]}},
            {"actor": (2, 3), "rollout": (0, 1), "reference": (2, 3)},
        ),
        "counts in the order of the roles": (
            {"rollout": {"devices": 2}, "reference": {"axes": {"data": 3}}},
            {"actor": (0,), "rollout": (1, 2), "reference": (3, 4, 5)},
        ),
        "another role's devices, in their order": (
            {"actor": {"devices": [3, 1]}, "reference": {"same_devices_as": "rollout", "axes": {"tp": 2}}},
            {"actor": (3, 1), "rollout": (3, 1), "reference": (3, 1)},
        ),
        "a chain of roles": (
            {"rollout": {"devices": "6-7"}, "reference": {"same_as": "rollout"}},
            {"actor": (0,), "rollout": (6, 7), "reference": (6, 7)},
        ),
    }.values(),
)
def test_which_devices(options: Any, devices: dict[str, tuple[int, ...]]) -> None:
    assert {str(p.role): p.place.devices for p in place(options).roles.values()} == devices


def test_an_engines_axes_are_those_that_divide_the_model() -> None:
    """Two key/value heads: tp 2 at most, the rest of the devices hold whole copies."""
    found = place({"actor": {"axes": {"fsdp": 8}}}, model=tiny_config())
    assert found[Role.ROLLOUT].place.axes == (("data", 4), ("tp", 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"actor": {"axes": {"fsdp": 4, "tp": 4}}},
            r"cluster.actor.axes \{'fsdp': 4, 'tp': 4\} needs 16 devices, this process has 8 devices",
        ),
        ({"rollout": {"devices": [7, 8]}}, r"cluster.rollout.devices \(7, 8\) goes to device 8, this process has 8 devices \(0 to 7\)"),
        (
            {"actor": {"devices": 6}, "rollout": {"axes": {"tp": 4}}},
            r"cluster.rollout.axes \{'tp': 4\} needs 4 devices of its own, .* and 2 are free \(taken: actor 0-5\)",
        ),
        (
            {"actor": {"devices": "0-3"}, "rollout": {"devices": [3, 4]}},
            r"cluster.rollout is on devices 3,4 and cluster.actor on 0-3: they share 3 but not all",
        ),
        ({"actor": {"devices": 4}, "rollout": {"same_devices_as": "actor", "axes": {"tp": 2}}}, r"are 2 devices, actor has 4"),
        ({"critic": {"devices": 1}}, r"cluster.critic gives devices to a role that this run doesn't have: only PPO has a critic"),
        ({"reward": {"devices": 1}}, r"cluster.reward gives .* there is no reward_model"),
    ],
)
def test_what_cannot_be_placed_says_what_there_is(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(options)


def test_a_reference_that_nobody_asks_is_refused_a_mesh() -> None:
    assert Role.REFERENCE not in place({}, needs_reference=False)
    with pytest.raises(UserError, match=r"cluster.reference gives .* set algorithm.beta, or leave cluster.reference out"):
        place({"reference": {"devices": 1}}, needs_reference=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": {"same_as": "actor", "axes": {"tp": 2}}}, "`same_as: actor` says all; `axes` beside it can't hold"),
        ({"rollout": {"same_devices_as": "actor", "devices": 2}}, "both say which devices"),
        ({"rollout": {"axes": {"tp": 2}, "devices": 4}}, "are 2 devices and `devices: 4` are 4"),
        ({"rollout": {"devices": [1, 1]}}, "must name each device once"),
        ({"rollout": {"devices": "5-4"}}, "the lower end of a range first"),
        ({"rollout": {"devices": []}}, "at least 1"),
        ({"actor": {"same_as": "rollout"}}, "`actor` can't be placed by another role"),
        ({"rollout": {"same_as": "critic"}, "critic": {"same_devices_as": "rollout"}}, "`rollout -> critic -> rollout` goes round"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterConfig.model_validate(options)
