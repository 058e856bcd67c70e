"""An engine without a cache: every token costs a forward pass over all that stands before it. For decoders that no other engine runs.

Owns the passage from a `Model`, whatever computes it, to completions. Noise and sampling are the native engine's, so a model that both run
says the same in both. Requests are answered one by one, a token in turn; small models and short completions are what it is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int, UInt32

from burnish.config.errors import UserError
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig, Precision
from burnish.models.model import Model
from burnish.models.transformer import Params, capped, forward, head_matrix, vocab_logits
from burnish.rollout.native.sample import Rules, Sampled, sample, uniforms
from burnish.rollout.native.scheduler import noise_key
from burnish.rollout.slotted import Call, SlottedEngine
from burnish.sync.checksum import checksum as checksum_of
from burnish.sync.reshard import reshard
from burnish.train.state import leaf_names


class RecomputingEngine(SlottedEngine):
    """Samples from a model on this process's first device. It takes the leaves of whole models, not adapters.

    context: the most tokens of prompt and completion together; None is what the model can read. max_kept: ids that a truncated
    distribution is cut from. precision: of the trainer, where the model has a choice.
    """

    def __init__(
        self, model: Model, *, context: int | None = None, slots: int = 8, max_kept: int = 64, precision: Precision = "f32"
    ) -> None:
        super().__init__(context=context or model.config.max_positions, slots=slots)
        self._decode_text, self._max_kept = model.codec.tokenizer.decode, max_kept
        self._place = SingleDeviceSharding(jax.local_devices()[0])
        self._params = jax.tree.map(partial(reshard, target=self._place), model.params)
        self._next = partial(_next, config=model.config, precision=precision)

    async def _answer(self, call: Call) -> None:
        draft, request = call.draft, call.draft.request
        prompt, params = request.prompt_ids, request.params
        tokens = np.zeros((1, min(self._context, max(16, 1 << (len(prompt) + draft.budget - 1).bit_length()))), np.int32)
        numbers = (params.temperature, np.float32), (params.top_k, np.int32), (params.top_p, np.float32), (params.min_p, np.float32)
        rules, key = Rules(*(jnp.asarray([number], dtype) for number, dtype in numbers)), jnp.asarray(noise_key(request)[None])
        max_kept = self._max_kept if params.truncates else 0
        while draft.stop is None:
            known = (*prompt, *draft.ids)
            tokens[0, : len(known)] = known
            place = jnp.asarray(len(known) - 1, jnp.int32), jnp.asarray([len(draft.ids)], jnp.int32)
            found = self._next(self._params, jnp.array(tokens), *place, rules, key, max_kept=max_kept)
            draft.extend(*map(np.asarray, found), version=self._version, decode_text=self._decode_text)
            await asyncio.sleep(0)
            self._refuse_when_closed()

    def _take(self, leaves: Mapping[str, Any], checksum: int | None) -> None:
        held = dict(zip(leaf_names(self._params), jax.tree.leaves(self._params), strict=True))
        if strange := [name for name, leaf in leaves.items() if name not in held or leaf.shape != held[name].shape]:
            raise UserError(f"the recomputing engine samples from a whole model, which has no {', '.join(strange)} of that shape")
        if checksum is not None and (came := checksum_of(leaves)) != checksum:
            raise RuntimeError(f"the weights came with the checksum {came} and were sent with {checksum}: the old ones stay")
        held |= {name: reshard(leaf, self._place) for name, leaf in leaves.items()}  # copies: a trainer donates its arrays
        self._params = jax.tree.unflatten(jax.tree.structure(self._params), list(held.values()))


@partial(jax.jit, static_argnames=("config", "precision", "max_kept"))
def _next(
    params: Params,
    tokens: Int[Array, "1 T"],
    last: Int[Array, ""],
    index: Int[Array, " 1"],
    rules: Rules,
    key: UInt32[Array, "1 2"],
    *,
    config: ModelConfig,
    precision: Precision,
    max_kept: int,
) -> Sampled:
    """The token after `tokens[:last + 1]`, the completion's `index`-th."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    segments = (positions <= last).astype(jnp.int32)
    states = forward(config, params, tokens, positions, Visibility(segments, jnp.zeros_like(segments)), precision=precision)
    state = jax.lax.dynamic_slice_in_dim(states[0], last, 1)
    head = head_matrix(config, params).astype(jnp.bfloat16 if precision == "bf16" else jnp.float32)
    return sample(capped(vocab_logits(state, head), config.logit_cap), rules, uniforms(key, index), max_kept=max_kept)
