"""Every family holds the laws of `testing.check_family`, and the laws can fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.families import FAMILIES
from burnish.models.transformer import Params, forward
from burnish.testing.check_family import check_cached_decode, check_family, check_packed, check_sharded, check_shared_prompt, lively_params
from burnish.testing.tiny import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_holds_every_law(family: str, tmp_path: Path) -> None:
    check_family(tiny_config(family), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_other_meshes_are_one_device_too(axes: dict[str, int]) -> None:
    check_sharded(tiny_config("qwen3"), lively_params(tiny_config("qwen3")), axes)


@pytest.mark.slow
def test_biases_everywhere_and_an_untied_head_hold_every_law(tmp_path: Path) -> None:
    check_family(replace(tiny_config("llama"), qkv_bias=True, o_bias=True, mlp_bias=True, tied_head=False), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("law", [check_packed, check_shared_prompt, check_cached_decode])
def test_a_law_fails_on_numbers_that_are_none(law: Callable[[ModelConfig, Params], None]) -> None:
    config = tiny_config("llama")
    params = lively_params(config) | {"final_norm": jnp.full(config.width, jnp.nan)}
    with pytest.raises(AssertionError, match="differs by nan"):
        law(config, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_leaf_shows_in_the_output_of_lively_params(family: str) -> None:
    """The laws can only catch what shows: shifting any one leaf's numbers by a place moves some hidden state.

    (An untied head is no part of the hidden states.)
    """
    config = tiny_config(family)
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    run = jax.jit(lambda params: forward(config, params, tokens, tokens, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))))
    params = lively_params(config)
    leaves, treedef = jax.tree.flatten(params)
    for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
        shifted = run(jax.tree.unflatten(treedef, [*leaves[:index], jnp.roll(leaf, 1, axis=-1), *leaves[index + 1 :]]))
        name = jax.tree_util.keystr(path, simple=True)
        assert name == "head" or float(jnp.abs(shifted - run(params)).max()) > 1e-3, name
