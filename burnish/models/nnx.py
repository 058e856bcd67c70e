"""A Flax NNX module as the decoder of a `Model` (extra `nnx`).

Owns the way in and the way back. A module is split once: its graph, which is static; its parameters (`nnx.Param`), a flat tree of float32
arrays by dotted names, which is trained, saved and pushed like any other; the rest of its state, which stays as it was. Programs put it
together while they are traced, so none of nnx's own transformations runs. What such a model can't do is refused where it is asked for it:
adapters, Hugging Face folders, cut weights, the native engine (`rollout.recomputing` samples from it).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from burnish.config.errors import UserError
from burnish.models.attention import Visibility, visible_pairs
from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.model import Model
from burnish.models.transformer import Params, ParamSpec
from burnish.text.codec import Codec

Hidden = Callable[[Any, Array, Array, Array], Array]
"""(module, tokens int32[B, T], positions int32[B, T], mask bool[B, T, T]: query, key) → normalised hidden states [B, T, D]."""
Head = Callable[[Any], Array]
"""module → [V, D], whose products with hidden states are the logits."""


@dataclasses.dataclass(frozen=True, eq=False)
class NnxDecoder:
    """A split module. It is equal to itself only, so each has programs of its own. dtypes: of the module's parameters, by name."""

    graph: Any
    rest: Any
    treedef: Any
    dtypes: Mapping[str, Any]
    spec: dict[str, ParamSpec]
    hidden_of: Hidden
    head_of: Head

    def module(self, params: Params) -> Any:
        """The module with these parameters."""
        from flax import nnx

        leaves = [params[name].astype(dtype) for name, dtype in self.dtypes.items()]
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves), self.rest)

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], visibility: Visibility
    ) -> Float[Array, "B T D"]:
        # Padding sees itself: a softmax over nothing would be NaN, and so would its gradient, though no loss reads it.
        mask = visible_pairs(visibility) | jnp.eye(tokens.shape[1], dtype=bool)[None]
        return self.hidden_of(self.module(params), tokens, positions, mask).astype(jnp.float32)

    def head(self, params: Params) -> Float[Array, "V D"]:
        return self.head_of(self.module(params))


def from_nnx(
    module: Any, text: str | Path, *, hidden: Hidden, head: Head, max_positions: int, template_kwargs: Mapping[str, Any] | None = None
) -> Model:
    """A model that computes as the module does; the module itself stays as it is.

    text: a folder with the tokenizer and its chat template. hidden, head: how the module is called; they see it as it was given, with
    other numbers. A query must see the keys that the mask says, and positions count from 0 in each sequence of a row: rows hold several.
    max_positions: the most tokens of a sequence. Raises UserError without flax.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise UserError(f"an NNX module needs flax ({error}): pip install 'burnish[nnx]'") from error
    graph, trained, rest = nnx.split(module, nnx.Param, ...)
    found, treedef = jax.tree.flatten_with_path(trained)
    leaves = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in found}
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    specs = {name: ParamSpec(leaf.shape, ("whole",) * leaf.ndim) for name, leaf in leaves.items()}
    decoder = NnxDecoder(graph, rest, treedef, dtypes, specs, hidden, head)
    params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
    vocab_size, width = jax.eval_shape(decoder.head, params).shape
    folder = Path(text)
    config = ModelConfig(
        family=f"the NNX module {type(module).__name__}",
        vocab_size=vocab_size,
        width=width,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width + width % 2,
        mlp_width=4 * width,
        rope=RopeConfig(1.0),
        max_positions=max_positions,
        decoder=decoder,
    )
    return Model(config, params, Codec.load(folder, template_kwargs=template_kwargs), folder)


def to_nnx(model: Model, params: Params) -> Any:
    """The module with parameters that were trained: `cluster.state.trainable`, `trainer.policy.trained`. Raises UserError for a model that
    isn't one."""
    if not isinstance(model.config.decoder, NnxDecoder):
        raise UserError(f"this model is of the {model.config.family} family, not an NNX module")
    return model.config.decoder.module(jax.tree.map(functools.partial(jnp.array, copy=True), params))
