"""A reward model in training: a decoder with one number a token, which orders answers as people did.

Owns the Bradley-Terry objective, how a pair is read for it, and the policy whose scores are trained: every weight, or an adapter beside a
frozen decoder with the score's row. The model is `models.scalar_head`, what a finished one does in a run `rl.reward_model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from burnish.config.schema import LoraConfig, MeshSpec
from burnish.config.tuning import RowsTrainingConfig
from burnish.data.examples import Answer, Example, pair
from burnish.models import scalar_head, weights
from burnish.models.attention import Visibility
from burnish.models.locate import locate
from burnish.models.lora import merge, spec_from
from burnish.models.model import Model, frozen_base
from burnish.models.quant import opened
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import Adapter, Dropout, Params
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics, clean
from burnish.text.codec import Codec
from burnish.text.tokenizer import read_json
from burnish.train.preference import PerAnswer, answer_sums
from burnish.train.trainers.objective import Objective, RowsMicroBatch
from burnish.train.trainers.policy import TrainedPolicy
from burnish.types import Prompt


def bradley_terry(chosen: PerAnswer, rejected: PerAnswer, margins: PerAnswer, *, centering: float = 0.0) -> Float[Array, " N"]:
    """-log σ(chosen - rejected - margin) + centering · (chosen + rejected)², of each pair's scores.

    The likelihood of Bradley & Terry, 1952, as in Ouyang et al., 2022, arXiv:2203.02155; margins: by how much better, where labels say
    (Touvron et al., 2023, arXiv:2307.09288). centering: holds the scores of a pair around 0, which their difference doesn't (Eisenstein et
    al., 2023, arXiv:2312.09244).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margins) + centering * jnp.square(chosen + rejected)


def ranked(pad_id: int | None, row: Prompt, codec: Codec) -> Example:
    """A row of the pair form, of whose answers the last token is scored: where a finished model's score is read. pad_id: one that isn't
    counted for it, as the model's config has it. A column `margin` says by how much the chosen one is better."""
    example = pair(row, codec)

    def last(answer: Answer) -> Answer:
        scored = np.zeros(len(answer.ids), bool)
        scored[len(answer.ids) - 1 - int(np.argmax(answer.ids[::-1] != (-1 if pad_id is None else pad_id)))] = True
        return dataclasses.replace(answer, trained=scored)

    return dataclasses.replace(example, answers=tuple(last(answer) for answer in example.answers))


def reward_objective(*, pad_id: int | None, centering: float = 0.0) -> Objective:
    """Of pairs, by the scores of their last tokens."""

    def loss(scores: Float[Array, "R M"], micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
        batch = micro.batch
        found = answer_sums(batch, scores)
        there = answer_sums(batch, jnp.ones_like(scores)) > 0
        chosen, rejected = found[0::2], found[1::2]
        margins = answer_sums(batch, jnp.asarray(batch.advantages))[0::2] - 1.0
        both = there[0::2] & there[1::2]
        mean = partial(_mean, there=both)
        metrics: Metrics = {
            "preference/accuracy": mean((chosen > rejected).astype(jnp.float32)),
            "preference/margin": mean(chosen - rejected),
            "preference/chosen": mean(chosen),
            "preference/rejected": mean(rejected),
        }
        return mean(bradley_terry(chosen, rejected, margins, centering=centering)), jax.lax.stop_gradient(metrics)

    measured = ("preference/accuracy", "preference/margin")
    return Objective("bradley_terry", partial(ranked, pad_id), loss, sequences=2, measured=measured)


def _mean(values: PerAnswer, there: Array) -> Mean:
    return Mean(jnp.sum(jnp.where(there, values, 0.0)), jnp.sum(there, dtype=jnp.float32))


def pad_id_of(folder: Path) -> int | None:
    """What `config.json` says padding is."""
    return read_json(folder / "config.json").get("pad_token_id")


class ScoredPolicy(TrainedPolicy):
    """Scores in place of log-probs. model: a path: a language model's folder, whose score starts at 0, or a sequence classifier's.

    What is trained is the whole tree of `scalar_head.spec`, or {"adapter": pairs, "score": [1, D]} beside the frozen decoder.
    """

    counts_load: ClassVar[bool] = False

    def __init__(
        self,
        model: str | Path,
        *,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: RowsTrainingConfig = RowsTrainingConfig(),
        seed: int = 0,
    ) -> None:
        self._place_at(mesh, precision, training, lora)
        folder = locate(str(model))
        codec = Codec.load(folder)
        config, params = weights.load_scalar(folder, mesh=self.mesh, zero_head=True)
        params = self._site.spread(params, scalar_head.spec(config))
        self.model = Model(config, params, codec, folder)
        self._is_fresh = True
        if lora is None:
            self.scale, self._base, self._first = None, None, params
            return
        decoder = frozen_base(dataclasses.replace(self.model, params=params["decoder"]), lora, self.mesh)
        start = weights.first_adapter(config, lora, jax.random.key(seed), decoder)
        self.model = dataclasses.replace(self.model, params={"decoder": decoder, "score": params["score"]})
        self.scale, self._base = start.scale, decoder
        self._first = {"adapter": self._site.spread(start.pairs, spec_from(config, lora)), "score": params["score"]}

    def _score(self, remat: Any = False, *, with_load: bool = False) -> Callable[..., tuple[Float[Array, "R M"], None]]:
        """(trained leaves, frozen ones, batch, noise, dropout) → what the model says after each scored token."""
        config, scale = self.model.config, self.scale

        def score(
            trainable: Params, base: Params | None, batch: TokenBatch, noise: Any = None, left_out: Dropout | None = None
        ) -> tuple[Float[Array, "R M"], None]:
            adapter = None if base is None or scale is None else Adapter(trainable["adapter"], scale, left_out)
            params = trainable if base is None else {"decoder": base, "score": trainable["score"]}
            tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
            rule = Visibility(jnp.asarray(batch.segments), jnp.asarray(batch.parents))
            options: dict[str, Any] = {"adapter": adapter, "precision": self.precision, "remat": remat}
            scalars = token_scalars(config, params, tokens, positions, rule, **options)
            return clean(jnp.take_along_axis(scalars, jnp.asarray(batch.own_columns), axis=1), jnp.asarray(batch.mask)), None

        return score

    def export(self, folder: Path) -> Path:
        """Write `model/`, a sequence classifier, an adapter merged into it."""
        params = self.state.trainable
        if self.scale is not None and self._base is not None:
            params = {"decoder": merge(opened(self._base), Adapter(params["adapter"], self.scale)), "score": params["score"]}
        weights.save_scalar(folder / "model", self.model.config, params, like=self.model.folder)
        return folder / "model"
