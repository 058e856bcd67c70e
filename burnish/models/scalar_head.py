"""A decoder with one number a token in place of a vocabulary: what critics and reward models are.

Owns the declaration of the parameters, their start from a language model, and the forward pass. The parameters are
{"decoder": as `transformer.spec`'s without a head, "score": [1, D]}, a tree that is sharded, trained and saved like any other. Folders are
read and written by `weights.py` (`load_scalar`, `save_scalar`), values are learned in `train.value`, conversations scored in
`rl.reward_model`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from burnish.config.errors import UserError
from burnish.models import transformer
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig, Precision
from burnish.models.sharding import shardings
from burnish.models.transformer import Adapter, Params, ParamSpec, Remat, dot, forward


def spec(config: ModelConfig) -> Params:
    """Shape, axes and initialiser of every leaf. The score has no bias, as transformers' classifiers have none."""
    if config.decoder is not None:
        raise UserError(f"a critic starts from a model's folder, and {config.family} has none: give algorithm.critic.path")
    decoder = {name: leaf for name, leaf in transformer.spec(config).items() if name != "head"}
    return {"decoder": decoder, "score": ParamSpec((1, config.width), ("labels", "embed"), "zeros")}


def with_zero_score(config: ModelConfig, decoder: Params, *, mesh: Mesh | None = None) -> Params:
    """A language model's decoder with a score that is 0 everywhere: values start at 0, and the score is the first to learn.

    Without the model's own head; the other arrays are shared, not copied.
    """
    score = jnp.zeros((1, config.width), decoder["final_norm"].dtype)
    if mesh is not None:
        score = jax.device_put(score, shardings({"score": spec(config)["score"]}, mesh)["score"])
    return {"decoder": {name: leaf for name, leaf in decoder.items() if name != "head"}, "score": score}


def token_scalars(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visibility: Visibility,
    *,
    adapter: Adapter | None = None,
    precision: Precision = "f32",
    remat: Remat = False,
) -> Float[Array, "B T"]:
    """The score of every token: what the model says after having read it and all that it sees. The head's product is in float32 always."""
    hidden = forward(config, params["decoder"], tokens, positions, visibility, adapter=adapter, precision=precision, remat=remat)
    return dot(hidden, params["score"].T, "f32")[..., 0]
