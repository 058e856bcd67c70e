"""Adapters: a fresh one changes nothing, a merged one computes the same (B121), and only the named matrices have one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.config.schema import LoraConfig
from burnish.models.attention import Visibility
from burnish.models.lora import init_adapter, merge
from burnish.models.transformer import Adapter, Dropout, Params, _dropped, forward, project
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config

CONFIG = tiny_config("qwen2")


@jax.jit
def hidden(params: Params, adapter: Adapter | None = None) -> Array:
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    return forward(CONFIG, params, tokens, tokens, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens)), adapter=adapter)


def lively(adapter: Adapter) -> Adapter:
    return adapter._replace(pairs=jax.tree.map(lambda leaf: leaf + 0.05, adapter.pairs))


def test_a_fresh_adapter_changes_no_bit() -> None:
    params = lively_params(CONFIG)
    adapter = init_adapter(CONFIG, LoraConfig(rank=4), jax.random.key(0))
    np.testing.assert_array_equal(hidden(params, adapter), hidden(params))
    assert all(float(jnp.abs(pair["a"]).max()) > 0 for pair in adapter.pairs.values())


def test_merged_is_base_with_adapter() -> None:
    """B121, with rank 4 and alpha 8; the base's arrays are left as they were."""
    params = lively_params(CONFIG)
    adapter = lively(init_adapter(CONFIG, LoraConfig(rank=4, alpha=8.0), jax.random.key(0)))
    before = jax.tree.map(np.array, params)
    np.testing.assert_allclose(hidden(merge(params, adapter)), hidden(params, adapter), atol=1e-4)
    assert float(jnp.abs(hidden(params, adapter) - hidden(params)).max()) > 0.1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, params))


def test_only_the_named_matrices_have_an_adapter() -> None:
    adapter = init_adapter(CONFIG, LoraConfig(rank=3, alpha=6.0, targets=("k", "down")), jax.random.key(0))
    assert {name: (pair["a"].shape, pair["b"].shape) for name, pair in adapter.pairs.items()} == {
        "k": ((2, 32, 3), (2, 3, 16)),
        "down": ((2, 64, 3), (2, 3, 32)),
    }
    assert adapter.scale == 2.0


# ------------------------------------------------------------------------------------------------------------- rsLoRA, DoRA, dropout


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert LoraConfig(rank=16, alpha=8.0).scale == 0.5 and LoraConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0
    adapter = init_adapter(CONFIG, LoraConfig(rank=4, alpha=3.0, rslora=True), jax.random.key(0))
    assert adapter.scale == 1.5


def test_dora_starts_as_the_base_and_merges_to_what_it_computes() -> None:
    params, options = lively_params(CONFIG), LoraConfig(rank=4, alpha=8.0, dora=True)
    fresh = init_adapter(CONFIG, options, jax.random.key(0), params)
    np.testing.assert_allclose(hidden(params, fresh), hidden(params), atol=1e-5)
    moved = lively(fresh)
    np.testing.assert_allclose(hidden(merge(params, moved)), hidden(params, moved), atol=1e-5)
    assert float(jnp.abs(hidden(params, moved) - hidden(params)).max()) > 0.1
    sizes = jnp.linalg.norm(merge(params, moved)["layers"]["q"], axis=1)
    np.testing.assert_allclose(sizes, moved.pairs["q"]["m"], rtol=1e-5)  # the columns have the sizes that are learned
    with pytest.raises(ValueError, match="give the base's params"):
        init_adapter(CONFIG, options, jax.random.key(0))


def test_doras_gradient_by_hand() -> None:
    """One row in, one column out of rank 1: y = m (w + s a b) x / |w + s a b| with the size a constant, at w 3, s 2, a 1, b .5: 4."""
    layer = {"q": jnp.array([[3.0]])}
    pair = {"a": jnp.array([[1.0]]), "b": jnp.array([[0.5]]), "m": jnp.array([8.0])}

    def y(pair: Params) -> Array:
        return project("q", layer, jnp.array([[5.0]]), Adapter({"q": pair}, 2.0), "f32")[0, 0]

    value, slopes = jax.value_and_grad(y)(pair)
    assert float(value) == 40.0
    assert {name: float(x.sum()) for name, x in slopes.items()} == {"a": 10.0, "b": 20.0, "m": 5.0}  # m/4 · x · s · (b, a); x · sign


def test_dropout_is_of_token_matrix_layer_and_step() -> None:
    """The same tokens lose the same numbers wherever they lie; what is left is larger by as much as went."""
    x = jnp.ones((2, 6, 400))
    numbers = jnp.array([[1, 1, 1, 2, 2, 0], [2, 2, 1, 1, 1, 0]])
    positions = jnp.array([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 0]])

    def dropped(step: int, matrix: int = 0) -> np.ndarray:
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), step))
        return np.asarray(_dropped(x, Dropout(0.25, key, (numbers, positions)), matrix))

    first = dropped(1)
    np.testing.assert_array_equal(first[0, :3], first[1, 2:5])
    np.testing.assert_array_equal(first[0, 3:5], first[1, :2])
    assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)} and 0.7 < (first > 0).mean() < 0.8
    for other in (first[0, 1], first[0, 3], dropped(2)[0, 0], dropped(1, matrix=1)[0, 0]):
        assert (other != first[0, 0]).mean() > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_the_gradient_of_an_adapter_is_that_of_the_merged_matrix(remat: bool) -> None:
    """d/db = scale · aᵀ d/dw, d/da = scale · d/dw bᵀ: the chain rule through w + scale · a b."""
    params = lively_params(CONFIG)
    adapter = lively(init_adapter(CONFIG, LoraConfig(rank=4, alpha=8.0), jax.random.key(0)))
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    rule = Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))

    def loss(params: Params, pairs: Params | None) -> Array:
        own = None if pairs is None else Adapter(pairs, adapter.scale)
        return jnp.sin(forward(CONFIG, params, tokens, tokens, rule, adapter=own, remat=remat)).mean()

    ours = jax.jit(jax.grad(loss, argnums=1))(params, adapter.pairs)
    whole = jax.jit(jax.grad(loss))(merge(params, adapter), None)["layers"]
    for name, pair in adapter.pairs.items():
        wanted_a = adapter.scale * jnp.einsum("lio,lro->lir", whole[name], pair["b"])
        wanted_b = adapter.scale * jnp.einsum("lir,lio->lro", pair["a"], whole[name])
        np.testing.assert_allclose(ours[name]["a"], wanted_a, atol=1e-5)
        np.testing.assert_allclose(ours[name]["b"], wanted_b, atol=1e-5)
