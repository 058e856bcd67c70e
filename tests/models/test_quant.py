"""Codes of 8 and 4 bits: hand-worked numbers, bytes as they are stored, no larger errors than plain rounding's, the same model by scan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.config.schema import LoraConfig
from burnish.models import quant
from burnish.models.attention import Visibility
from burnish.models.lora import init_adapter, merge
from burnish.models.quant import Code, Quantised, dense, opened, quantise, quantised, quantised_spec
from burnish.models.sharding import shardings
from burnish.models.transformer import Adapter, Params, ParamSpec, Remat, forward
from burnish.models.transformer import spec as model_spec
from burnish.rollout.native.layout import Layout
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config

CONFIG = tiny_config("qwen2")
CODES: tuple[Code, ...] = ("int8", "int4", "nf4")
PAPER = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
PAPER += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def test_nf4_is_the_papers_table() -> None:
    np.testing.assert_allclose(quant.nf4_table(), PAPER, atol=1e-6)


def test_a_column_by_hand() -> None:
    """Four rows are one block; 4-bit codes pair the first half of a block with the second."""
    column = jnp.array([[2.0], [-1.0], [0.3], [0.0]])
    small = quantise(column, "int4")
    # At a scale of .88 · 2, in bfloat16, 8/7, -4/7 and 1/7 lie nearer to the column than 1, -4/7 and 1/7 of 2: .0025 squared against .0206.
    assert small.codes.dtype == jnp.uint8 and small.codes.tolist() == [[[15 + 16 * 8], [3 + 16 * 7]]]
    np.testing.assert_allclose(dense(small)[:, 0], 1.7578125 * np.array([8 / 7, -4 / 7, 1 / 7, 0.0]), rtol=1e-6)
    normal = quantise(column, "nf4")
    assert normal.codes.tolist() == [[[15 + 16 * 9], [2 + 16 * 7]]]  # ±.5 and .15 of the scale lie nearest to -.525 and .161
    np.testing.assert_allclose(dense(normal)[:, 0], 2 * np.array([1.0, PAPER[2], PAPER[9], 0.0]), rtol=1e-5)
    wide = quantise(column, "int8")
    assert wide.codes.tolist() == [[[127], [-64], [19], [0]]]  # -63.5 and 19.05, rounded; half to even
    np.testing.assert_allclose(dense(wide)[:, 0], 2 / 127 * np.array([127, -64, 19, 0]), rtol=1e-6)


@pytest.mark.parametrize("code", CODES)
def test_no_block_is_further_off_than_by_rounding_at_its_largest_number(code: Code) -> None:
    matrix = jax.random.normal(jax.random.key(0), (3, 192, 10))
    found = quantise(matrix, code)
    size = 64 if code == "int8" else 16
    assert found.shape == matrix.shape and found.scales.shape == (3, 192 // size, 10)
    blocks = np.asarray(matrix).reshape(3, -1, size, 10)
    table = {"int8": np.arange(-127, 128) / 127, "int4": np.arange(-7, 8) / 7, "nf4": np.array(PAPER)}[code]
    scale = np.abs(blocks).max(axis=2, keepdims=True)
    nearest = table[np.abs(blocks[..., None] / scale[..., None] - table).argmin(axis=-1)] * scale
    ours = np.square(np.asarray(dense(found)).reshape(blocks.shape) - blocks).sum(axis=2)
    plain = np.square(nearest - blocks).sum(axis=2)
    assert (ours <= 1.3 * plain + 3e-4).all() and 0 < ours.sum() <= (1.1 if code == "int8" else 0.9) * plain.sum()
    again = quantise(dense(found), code)
    np.testing.assert_array_equal(again.codes, found.codes)


def test_zeros_and_blocks_of_odd_sizes() -> None:
    assert not dense(quantise(jnp.zeros((8, 2)), "nf4")).any()
    assert quantise(jnp.ones((130, 1)), "int8").scales.shape == (5, 1)  # 26 is the largest divisor up to 64
    with pytest.raises(ValueError, match="of which 9 are cut into blocks of 9: use int8"):
        quantise(jnp.ones((9, 1)), "int4")


def test_stored_bytes_of_a_model_of_135_million() -> None:
    """QLoRA nf4 of SmolLM2's sizes: quantised matrices, scales included, at most .35 of their bf16 bytes, the whole base at most .50."""
    sizes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "mlp_width": 1536}
    config = dataclasses.replace(tiny_config(width=576, num_layers=30, vocab_size=49152), **sizes)
    plain = model_spec(config)
    declared = quantised_spec(plain, "nf4")

    def leaves(tree: Params) -> list[ParamSpec]:
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ParamSpec))

    def stored(tree: Params) -> int:
        return sum(int(np.prod(s.shape)) * jnp.dtype(s.dtype).itemsize for s in leaves(tree))

    def bf16(tree: Params) -> int:
        return sum(2 * int(np.prod(s.shape)) for s in leaves(tree))

    matrices = {name: x for name, x in declared["layers"].items() if isinstance(x, Quantised)}
    assert stored(matrices) / bf16({name: plain["layers"][name] for name in matrices}) == pytest.approx(0.3125)
    assert stored(declared) / bf16(plain) <= 0.50


# --------------------------------------------------------------------------------------------------------------------- whole models

LORA = LoraConfig(rank=4, alpha=8.0, dora=True)


def lively_adapter(params: Params, lora: LoraConfig = LORA) -> Adapter:
    adapter = init_adapter(CONFIG, lora, jax.random.key(0), params)
    return adapter._replace(pairs=jax.tree.map(lambda leaf: leaf + 0.05, adapter.pairs))


def loss(params: Params, adapter: Adapter, remat: Remat = False) -> Array:
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    rule = Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))
    return jnp.sin(forward(CONFIG, params, tokens, tokens, rule, adapter=adapter, remat=remat)).mean()


def gradient(params: Params, adapter: Adapter, remat: Remat = False) -> tuple[Array, Params]:
    return jax.jit(jax.value_and_grad(lambda pairs: loss(params, Adapter(pairs, adapter.scale), remat)))(adapter.pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "remat"), [("nf4", True), ("int4", "nested")])
def test_codes_in_the_scan_are_the_numbers_that_they_stand_for(code: Code, remat: Remat) -> None:
    base = quantised(lively_params(CONFIG), code)
    adapter = lively_adapter(base)
    ours, theirs = gradient(base, adapter, remat), gradient(opened(base), adapter, remat)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
        assert np.abs(a).max() > 0
    plain = lively_params(CONFIG)
    assert abs(float(ours[0]) - float(loss(plain, adapter))) > 1e-6, "codes round"


def test_declared_and_made_are_one_tree_on_a_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, width=128, mlp_width=256, head_dim=32)
    places = shardings(quantised_spec(model_spec(config), "nf4"), mesh)
    params = lively_params(config)
    spread, alone = quantised(params, "nf4", places), quantised(params, "nf4")
    for here, there, place in zip(*map(jax.tree.leaves, (spread, alone, places)), strict=True):
        assert here.sharding == place and here.dtype == there.dtype
        np.testing.assert_array_equal(here, there)
    sizes = jax.tree.leaves(quantised_spec(model_spec(config), "nf4"), is_leaf=lambda x: isinstance(x, ParamSpec))
    assert [(x.shape, x.dtype.name) for x in jax.tree.leaves(alone)] == [(s.shape, s.dtype) for s in sizes]
    assert quant.stored_bytes(alone) == sum(x.nbytes for x in jax.tree.leaves(alone))
    assert spread["layers"]["up"].codes.addressable_shards[0].data.nbytes == alone["layers"]["up"].codes.nbytes // 4


@pytest.mark.parametrize("targets", [("q", "down"), LORA.targets])
def test_the_engine_samples_from_the_merged_numbers(targets: tuple[str, ...]) -> None:
    """Whether a matrix has an adapter or not, and again after an update of the adapter."""
    base = quantised(lively_params(CONFIG), "nf4")
    adapter = lively_adapter(base, LORA.model_copy(update={"targets": targets}))
    layout = Layout.build(CONFIG, base, adapter, precision="f32")
    moved = adapter._replace(pairs=jax.tree.map(lambda leaf: leaf * 1.5, adapter.pairs))
    names = {f"adapter.{name}.{part}": x for name, pair in moved.pairs.items() for part, x in pair.items()}
    for made, now in ((layout, adapter), (layout.updated(names), moved)):
        whole = merge(opened(base), now)
        for i, layer in enumerate(made.weights.layers):
            for name, x in layer.items():
                np.testing.assert_allclose(x, whole["layers"][name][i], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(made.weights.embed, whole["embed"])
