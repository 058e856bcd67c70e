"""What every family of models must hold, whatever its configuration. No other library is needed: parity is the parity lane's.

    check_family(tiny_config("qwen3"), tmp_path)

Owns the laws: saved and loaded is the same bit by bit; packing, sharing a prompt, decoding over a cache, merging an adapter and sharding
over devices change nothing. Sequences are longer than the windows of tiny models. Called by the tests of `models`, and by anyone who adds
a family. A violation is an `AssertionError` that names the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, Int

from burnish.models import families, lora, weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.rope import rope_angles
from burnish.models.sharding import batch_sharding, shardings
from burnish.models.transformer import (
    Adapter,
    LayerTraits,
    Params,
    block,
    capped,
    draw,
    embed,
    forward,
    init,
    layer_traits,
    normed,
    own_attention,
    spec,
)

MESHES = ({"data": 2, "fsdp": 2, "tp": 2},)
WIDTH = 24
TOLERANCE = 2e-5


def check_family(config: ModelConfig, folder: str | Path, *, meshes: Sequence[dict[str, int]] = MESHES) -> None:
    """Check every law at float32 on random parameters in which no leaf is at its neutral start. meshes: if there are so many devices."""
    params = lively_params(config)
    check_round_trip(config, params, folder)
    check_packed(config, params)
    check_shared_prompt(config, params)
    check_cached_decode(config, params)
    check_merged(config, params, folder)
    for axes in meshes:
        if len(jax.devices()) >= np.prod(list(axes.values())):
            check_sharded(config, params, axes)


def lively_params(config: ModelConfig, *, seed: int = 0) -> Params:
    """Random parameters of a size at which every leaf matters: a forgotten bias or norm shows in the output."""
    leaves, treedef = jax.tree.flatten(init(config, jax.random.key(seed)))
    noise = [jax.random.normal(jax.random.fold_in(jax.random.key(seed + 1), i), leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, [leaf + 0.2 * n for leaf, n in zip(leaves, noise, strict=True)])


def check_round_trip(config: ModelConfig, params: Params, folder: str | Path) -> None:
    """save → load gives the same configuration and bitwise the same leaves."""
    weights.save(folder, config, params)
    config_again, again = weights.load(folder)
    assert config_again == config, f"save → load changed the configuration: {config} became {config_again}"
    for (path, before), (_, after) in zip(jax.tree.leaves_with_path(params), jax.tree.leaves_with_path(again), strict=True):
        assert np.array_equal(before, after), f"save → load changed the leaf {jax.tree_util.keystr(path)}"


def check_packed(config: ModelConfig, params: Params) -> None:
    """Two sequences in one row, with padding behind them, give what each gives alone."""
    first, second = _tokens(config, 7, seed=1), _tokens(config, 11, seed=2)
    packed = _hidden(
        config, params, [*first, *second, 0, 0], segments=[1] * 7 + [2] * 11 + [0] * 2, positions=[*range(7), *range(11), 0, 0]
    )
    _assert_close("packed = unpacked", packed[:7], _hidden(config, params, first))
    _assert_close("packed = unpacked", packed[7:18], _hidden(config, params, second))


def check_shared_prompt(config: ModelConfig, params: Params) -> None:
    """A prompt that stands once in a row serves two completions as if each had its own."""
    prompt, completions = _tokens(config, 6, seed=1), (_tokens(config, 5, seed=2), _tokens(config, 8, seed=3))
    shared = _hidden(
        config,
        params,
        [*prompt, *completions[0], *completions[1]],
        segments=[1] * 6 + [2] * 5 + [3] * 8,
        parents=[0] * 6 + [1] * 13,
        positions=[*range(6), *range(6, 11), *range(6, 14)],
    )
    _assert_close("shared prompt = own prompt", shared[:11], _hidden(config, params, [*prompt, *completions[0]]))
    _assert_close("shared prompt = own prompt", shared[11:], _hidden(config, params, [*prompt, *completions[1]])[6:])


def check_cached_decode(config: ModelConfig, params: Params) -> None:
    """Token by token over a cache of keys and values gives what the whole row gives."""
    tokens = _tokens(config, 12, seed=4)
    cached = _decode(config, params, jnp.asarray(tokens, jnp.int32))
    _assert_close("cached decode = full forward", cached, _hidden(config, params, tokens))


def check_merged(config: ModelConfig, params: Params, folder: str | Path) -> None:
    """An adapter in its matrices computes what it does beside them, also once it has been saved and loaded; a tied head stays tied."""
    targets = tuple(name for name in families.MODULES if params["layers"][name].ndim == 3)
    pairs = draw(lora.adapter_spec(config, rank=4, targets=targets), jax.random.key(5))
    adapter = Adapter(jax.tree.map(lambda leaf: leaf + 0.05, pairs), 2.0)
    tokens = _tokens(config, 18, seed=5)
    beside, merged = _hidden(config, params, tokens, pairs=adapter.pairs, scale=adapter.scale), lora.merge(params, adapter)
    weights.save(folder, config, merged)
    loaded = weights.load(folder)[1]
    assert ("head" in loaded) == (not config.tied_head), "a tied head is stored apart after merging"
    for params_after in (merged, loaded):
        _assert_close("merged = unmerged", _hidden(config, params_after, tokens), beside, tolerance=1e-5)
    assert np.abs(beside - _hidden(config, params, tokens)).max() > 1e-2, "the adapter does nothing"


def check_sharded(config: ModelConfig, params: Params, axes: dict[str, int]) -> None:
    """A loss and its gradient on a mesh are those of one device."""
    count = int(np.prod(list(axes.values())))
    mesh = Mesh(np.asarray(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    tokens = jnp.asarray([_tokens(config, 10, seed=seed) for seed in range(4)], jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

    @jax.jit
    def loss_and_gradient(params: Params, tokens: Array, positions: Array) -> tuple[Array, Params]:
        rule = Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))
        return jax.value_and_grad(lambda params: jnp.mean(jnp.sin(forward(config, params, tokens, positions, rule))))(params)

    single = loss_and_gradient(params, tokens, positions)
    rows = batch_sharding(mesh)
    spread = loss_and_gradient(
        jax.device_put(params, shardings(spec(config), mesh)), jax.device_put(tokens, rows), jax.device_put(positions, rows)
    )
    for one, many in zip(jax.tree.leaves(single), jax.tree.leaves(spread), strict=True):
        _assert_close(f"sharded over {axes} = single", many, one)


# ------------------------------------------------------------------------------------------------------------------------- helpers


def _tokens(config: ModelConfig, count: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


@partial(jax.jit, static_argnames=("config", "scale"))
def _forward(
    config: ModelConfig, params: Params, tokens: Array, positions: Array, rule: Visibility, *, pairs: Params | None, scale: float
) -> Float[Array, "B T D"]:
    return forward(config, params, tokens, positions, rule, adapter=None if pairs is None else Adapter(pairs, scale))


def _hidden(
    config: ModelConfig,
    params: Params,
    tokens: list[int],
    *,
    segments: list[int] | None = None,
    parents: list[int] | None = None,
    positions: list[int] | None = None,
    pairs: Params | None = None,
    scale: float = 1.0,
) -> Float[Array, "T D"]:
    """Hidden states of one row, by default one sequence of its own; padded to one width, so that one program serves every law."""
    length = len(tokens)

    def row(values: list[int]) -> Int[Array, "1 T"]:
        return jnp.asarray([values + [0] * (WIDTH - length)], jnp.int32)

    rule = Visibility(row(segments or [1] * length), row(parents or [0] * length))
    hidden = _forward(config, params, row(tokens), row(positions or list(range(length))), rule, pairs=pairs, scale=scale)
    return hidden[0, :length]


@partial(jax.jit, static_argnums=0)
def _decode(config: ModelConfig, params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """The plainest cached decode: one token at a time over keys and values [L, T, K, h]."""
    columns = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    group = config.num_heads // config.num_kv_heads

    def step(cache: tuple[Array, Array], token_and_position: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        token, position = token_and_position
        angles = rope_angles(config, position[None])

        def one_layer(x: Array, inputs: tuple[Params, LayerTraits | None, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            layer, traits, keys, values = inputs
            own = own_attention(config, traits)

            def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
                held = keys.at[position].set(k[0]), values.at[position].set(v[0])
                all_keys, all_values = (jnp.repeat(kind, group, axis=1) for kind in held)
                scores = capped(jnp.einsum("hd,shd->hs", q[0], all_keys) * config.head_dim**-0.5, own["cap"])
                seen = columns[None] <= position
                if own["window"] is not None:
                    seen &= position - columns[None] < own["window"]
                weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
                return jnp.einsum("hs,shd->hd", weights, all_values)[None], held

            return block(config, layer, x, angles, attend, traits=traits)

        start = embed(config, params["embed"], token[None])
        x, cache = jax.lax.scan(one_layer, start, (params["layers"], layer_traits(config), *cache))
        return cache, normed(config, x, params["final_norm"])[0]

    empty = jnp.zeros((config.num_layers, tokens.shape[0], config.num_kv_heads, config.head_dim))
    return jax.lax.scan(step, (empty, empty), (tokens, columns))[1]


def _assert_close(law: str, got: Array, wanted: Array, *, tolerance: float = TOLERANCE) -> None:
    difference = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64)).max()
    scale = max(1.0, float(np.abs(np.asarray(wanted)).max()))
    assert difference <= tolerance * scale, f"{law}: differs by {difference:.2e} at a size of {scale:.2e} (tolerance {tolerance:.0e})"
