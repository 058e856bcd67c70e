"""The checksum of pushed weights: the same however arrays are cut, another for whatever could go wrong on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from burnish.models import transformer
from burnish.rollout.native.engine import NativeEngine
from burnish.sync.checksum import Tally, checksum
from tests.rollout.reference import CONFIG, OPTIONS, generate, random_params, request, run

LEAF = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def by_hand(name_crc: int, leaf: np.ndarray) -> int:
    """Slowly, with Python's whole numbers."""
    bits = np.ascontiguousarray(leaf).view(np.uint32 if leaf.dtype.itemsize == 4 else np.uint16).ravel().tolist()

    def stirred(h: int) -> int:
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    assert stirred(1) == 0x514E28B7  # the published value of this step
    return sum(stirred((stirred(value) + place) % 2**32) for place, value in enumerate(bits)) % 2**32 * (2 * name_crc + 1) % 2**32


def test_its_value_is_the_one_by_hand() -> None:
    assert checksum({"": jnp.asarray(LEAF)}) == by_hand(0, LEAF)  # crc32 of nothing is 0
    half = LEAF.astype(jnp.bfloat16)
    assert checksum({"": jnp.asarray(half)}) == by_hand(0, half)
    assert checksum({"a": jnp.asarray(LEAF)}) == by_hand(0xE8B7BE43, LEAF)  # the published check value of "a"


@pytest.mark.parametrize("parts", [PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("x", "y"), PartitionSpec()])
def test_cuts_and_orders_make_no_difference(parts: PartitionSpec) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spread = jax.device_put(LEAF, NamedSharding(mesh, parts))
    tally = Tally()
    for name, leaf in (("b", jnp.ones(3)), ("a", spread)):
        tally.add(name, leaf)
    assert tally.total() == checksum({"a": jnp.asarray(LEAF), "b": jnp.ones(3)})


def test_what_could_go_wrong_changes_it() -> None:
    right = checksum({"q": jnp.asarray(LEAF), "k": jnp.zeros((8, 6))})
    swapped = LEAF.copy()
    swapped[0, 0], swapped[0, 1] = LEAF[0, 1], LEAF[0, 0]
    off_by_one_bit = LEAF.copy()
    off_by_one_bit.view(np.uint32)[3, 3] ^= 1
    wrong = [
        {"q": jnp.zeros((8, 6)), "k": jnp.asarray(LEAF)},
        {"q": jnp.asarray(LEAF.T)},
        {"q": jnp.asarray(swapped)},
        {"q": jnp.asarray(off_by_one_bit)},
        {"q": jnp.asarray(LEAF[:-1])},
        {"q": jnp.asarray(-LEAF)},
    ]
    assert len({right, *(checksum(leaves) for leaves in wrong)}) == 7


def test_an_engine_refuses_what_isnt_what_was_sent() -> None:
    params, other = random_params(), random_params(seed=7)
    engine = NativeEngine(CONFIG, params, **OPTIONS)
    try:
        before = generate(engine, [request((5, 6, 7))])[0]
        leaves = {"embed": other["embed"], "layers.q": other["layers"]["q"]}

        async def push(check: int) -> None:
            await engine.begin_update(1)
            for name, leaf in leaves.items():
                await engine.push(name, leaf)
            await engine.commit_update(check)

        with pytest.raises(RuntimeError, match="came with the checksum .* the old weights stay"):
            run(push(checksum({"embed": other["embed"], "layers.q": params["layers"]["q"]})))
        after = generate(engine, [request((5, 6, 7))])[0]
        assert engine.version == 0 and after.ids.tolist() == before.ids.tolist()
        run(push(checksum(leaves)))
        assert engine.version == 1 and generate(engine, [request((5, 6, 7))])[0].logps.tolist() != before.logps.tolist()
    finally:
        run(engine.close())


def test_it_covers_every_leaf_of_a_model() -> None:
    params = random_params()
    names = [*transformer.spec(CONFIG)["layers"]]
    whole = checksum(params["layers"])
    for name in names:
        changed = params["layers"] | {name: params["layers"][name] + 1}
        assert checksum(changed) != whole, name
