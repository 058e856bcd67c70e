"""A reward model: conversations in, one score each, by a sequence classifier on the trainer's devices.

Owns reading its folder, its own tokenizer and chat template, and micro-batches of few compiled shapes. `RewardModel.score` has the form of
a reward function and is one for the `RewardManager`, which calls it from threads of the producer; the cluster holds it and says where it
runs. Doesn't own what becomes of a score (`rewards.manager`) or the model's arithmetic (`models.scalar_head`).

The same conversation has the same score whatever is scored beside it: its padded length depends on its own only, and groups are never
mixed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from burnish.config.errors import UserError
from burnish.config.schema import RewardModelSection
from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.scalar_head import token_scalars
from burnish.models.sharding import batch_sharding
from burnish.models.transformer import Params, Precision
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.layout import bucket
from burnish.sync.host_memory import Shelf
from burnish.text.codec import Codec
from burnish.text.tokenizer import read_json
from burnish.types import Message

log = logging.getLogger(__name__)

LENGTH_STEP = 64
"""Padded lengths are multiples of this, see `layout.bucket`."""


def check_reward_model(section: RewardModelSection) -> tuple[Path, Codec]:
    """The folder and the text side of a reward model, with every mistake that shows without reading weights."""
    folder = locate(section.path)
    codec, config = Codec.load(folder), weights.load_scalar_config(folder)
    if section.max_tokens is not None and section.max_tokens > config.max_positions:
        raise UserError(
            f"reward_model.max_tokens is {section.max_tokens}, but {folder} was made for {config.max_positions} positions "
            "(max_position_embeddings): use at most that"
        )
    return folder, codec


_ALONE = contextlib.nullcontext()


class RewardModel:
    """Scores whole conversations.

    `score` may be called from any thread; one call runs at a time, so that memory holds one micro-batch. mesh: where the weights are, in
    pieces; None is the default device. dispatch: held while a program of several devices is started and run, see `rl.sites`. offload: the
    weights wait in the host's memory between calls.
    """

    def __init__(
        self,
        section: RewardModelSection,
        *,
        precision: Precision = "f32",
        mesh: Mesh | None = None,
        rows_multiple: int = 1,
        dispatch: contextlib.AbstractContextManager[Any] = _ALONE,
        offload: bool = False,
    ) -> None:
        folder, self._codec = check_reward_model(section)
        # The weights aren't trained, so they stay as they are stored: products widen or round them anyhow.
        self.config, params = weights.load_scalar(folder, dtype=None, mesh=mesh)
        self._shelf = Shelf(params, offload=offload)
        self.max_tokens = section.max_tokens or self.config.max_positions
        self._rows = bucket(section.micro_batch_size, multiple=rows_multiple)
        self._place = partial(jax.device_put, device=None if mesh is None else batch_sharding(mesh))
        self._compute = make_scores(self.config, precision)
        self._dispatch = dispatch
        self._pad_id: int | None = read_json(folder / "config.json").get("pad_token_id")
        self._turn, self._counts = threading.Lock(), threading.Lock()
        self._num_scored = self._num_too_long = 0

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """The score of each conversation at its last token, through the model's own chat template, without an opened answer.

        The last token is the last that isn't the config's `pad_token_id`, as in transformers. A conversation of more than `max_tokens`
        tokens gets None, and is counted: a cut one isn't what the model was trained to read.
        """
        encoded = [self._encode(conversation) for conversation in conversations]
        fitting = [index for index, ids in enumerate(encoded) if len(ids) <= self.max_tokens]
        self._count(len(fitting), len(encoded) - len(fitting))
        scores: list[float | None] = [None] * len(encoded)
        lengths: dict[int, list[int]] = {}
        for index in fitting:
            lengths.setdefault(min(bucket(len(encoded[index]), multiple=LENGTH_STEP), self.config.max_positions), []).append(index)
        with self._turn, span("score", role="reward", sequences=len(fitting)):
            params = self.params
            for length, members in sorted(lengths.items()):
                for start in range(0, len(members), self._rows):
                    part = members[start : start + self._rows]
                    for index, value in zip(part, self._run(params, [encoded[i] for i in part], length), strict=False):
                        scores[index] = value
        return scores

    @property
    def params(self) -> Params:
        """Its weights, on the devices."""
        return self._shelf.tree

    def take_metrics(self) -> dict[str, Metric]:
        """How many conversations were scored, and how many were too long, since the last call."""
        with self._counts:
            scored, too_long, self._num_scored, self._num_too_long = self._num_scored, self._num_too_long, 0, 0
        return {"reward_model/scored": Metric("sum", float(scored)), "reward_model/too_long": Metric("sum", float(too_long))}

    def _encode(self, conversation: Sequence[Message]) -> list[int]:
        ids = self._codec.template.encode(conversation, add_generation_prompt=False)
        end = len(ids)
        while end > 1 and ids[end - 1] == self._pad_id:
            end -= 1
        return ids[:end]

    def _run(self, params: Params, sequences: Sequence[Sequence[int]], length: int) -> list[float]:
        """Scores of at most `_rows` sequences, padded to one compiled shape."""
        tokens, lasts = np.zeros((self._rows, length), np.int32), np.zeros(self._rows, np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], lasts[row] = ids, len(ids) - 1
        with self._dispatch:
            return np.asarray(self._compute(params, self._place(tokens), self._place(lasts))).tolist()[: len(sequences)]

    def _count(self, scored: int, too_long: int) -> None:
        with self._counts:
            first = too_long > 0 and self._num_too_long == 0
            self._num_scored += scored
            self._num_too_long += too_long
        if first:
            log.warning("%d conversations have more than %d tokens: the reward model gives them no reward", too_long, self.max_tokens)


def make_scores(config: ModelConfig, precision: Precision) -> Callable[[Params, Array, Array], Float[Array, " B"]]:
    @jax.jit
    def scores(params: Params, tokens: Int[Array, "B T"], lasts: Int[Array, " B"]) -> Float[Array, " B"]:
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        rule = Visibility((columns <= lasts[:, None]).astype(jnp.int32), jnp.zeros_like(tokens))
        scalars = token_scalars(config, params, tokens, columns, rule, precision=precision)
        return jnp.take_along_axis(scalars, lasts[:, None], axis=1)[:, 0]

    return scores
