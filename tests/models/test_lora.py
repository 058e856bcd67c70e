"""Adapters: a fresh one changes nothing, a merged one computes the same (B121), and only the named matrices have one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from burnish.config.schema import LoraConfig
from burnish.models.attention import Visibility
from burnish.models.lora import init_adapter, merge
from burnish.models.transformer import Adapter, Params, forward
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
