"""A student and its teacher: the policy whose loss compares the two on rows of data.

Owns the teacher's weights and the pass through both models; what is compared is `train.distillation`, the student itself `policy`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from burnish.config.distillation import DistillationSection
from burnish.config.errors import UserError
from burnish.config.schema import LoraConfig, MeshSpec
from burnish.config.tuning import RowsTrainingConfig
from burnish.data.examples import SupervisedReader, supervised
from burnish.models import transformer, weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.models.transformer import Adapter, Params, forward_with_states, head_matrix
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics, clean
from burnish.rl.reference import fingerprint
from burnish.rl.vocabulary import check_reads_ids
from burnish.text.codec import Codec
from burnish.train.distillation import activity, direction_distance, pooling, same_depth, teacher_head
from burnish.train.preference import answer_sums
from burnish.train.score import HeadOptions, target_scores
from burnish.train.trainers.noise import dropout
from burnish.train.trainers.objective import Objective, RowsMicroBatch
from burnish.train.trainers.policy import TrainedPolicy

MEASURED = {
    "divergence": "distillation/divergence",
    "nll": "distillation/nll",
    "features": "distillation/features",
    "attention": "distillation/attention",
}
"""The metrics of what is compared."""


def distillation_objective(options: DistillationSection) -> Objective:
    """How rows are read and what is measured; the loss is the policy's, as it takes two models."""

    def loss(logps: Float[Array, "R M"], micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
        raise NotImplementedError("a distilled policy computes its loss from both models: use DistillationTrainer")

    present = (options.divergence, True, options.features, options.attention)
    return Objective(
        "distillation", supervised, loss, SupervisedReader, measured=tuple(m for m, p in zip(MEASURED.values(), present, strict=True) if p)
    )


def check_distillation_teacher(path: str, codec: Codec, *, max_tokens: int) -> tuple[Path, ModelConfig]:
    """The folder and architecture of a teacher that reads what the student does; reads no weights. Raises UserError."""
    if not path:
        raise UserError("teacher.path isn't set: give the model to learn from, a folder or a name from `burnish fetch`")
    folder = locate(path)
    config = weights.load_config(folder)
    check_reads_ids("teacher.path", "teacher", folder, config, codec, context=max_tokens)
    return folder, config


class DistilledPolicy(TrainedPolicy):
    """The student, every weight or an adapter of it, and projections of its features, where those are learned too.

    teacher: a `Model`, or a path. What is trained is {"student": …, "projections": {"layer": [D student, D teacher]}}.
    """

    counts_load: ClassVar[bool] = False

    def __init__(
        self,
        model: Model | str | Path,
        teacher: Model | str | Path,
        options: DistillationSection,
        *,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: RowsTrainingConfig = RowsTrainingConfig(),
        seed: int = 0,
    ) -> None:
        super().__init__(model, lora=lora, precision=precision, mesh=mesh, training=training, seed=seed)
        self.options = options
        if isinstance(teacher, Model):
            self.teacher_config, params = teacher.config, teacher.params
        else:
            folder, self.teacher_config = check_distillation_teacher(str(teacher), self.model.codec, max_tokens=training.max_tokens)
            params = weights.load(folder, mesh=self.mesh)[1]
        self._teacher = self._site.spread(params, transformer.spec(self.teacher_config))
        self._frozen_student = self._base
        self._base = {"student": self._base, "teacher": self._teacher}
        self._first = {"student": self._first, "projections": self._projections(seed)}

    def _projections(self, seed: int) -> Params:
        features = self.options.features
        if features is None or features.match == "pool":
            return {}
        shape = (self.model.config.width, self.teacher_config.width)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), len(features.layers))
        start = {str(i): jax.random.normal(key, shape) / math.sqrt(shape[0]) for i, key in enumerate(keys)}
        return start if self.mesh is None else jax.device_put(start, jax.NamedSharding(self.mesh, jax.sharding.PartitionSpec()))

    @property
    def trained(self) -> Params:
        """The student's, without projections."""
        return self.state.trainable["student"]

    def forget_reference(self) -> None:
        """The state has its own copy of what is trained."""
        self._first = {}
        if self._frozen_student is None:
            self.model = dataclasses.replace(self.model, params={})

    def frozen_digest(self, *, has_reference: bool) -> str | None:
        """Of the teacher, and of the student's frozen base."""
        base = "" if self._frozen_student is None else f"+{fingerprint(self._frozen_student)}"
        return f"{fingerprint(self._teacher)}{base}"

    # ------------------------------------------------------------------------------------------------------------------ the loss

    def _loss(self, objective: Objective, alpha: float | None, *, with_load: bool) -> Callable[..., Any]:
        remat = self.scale is None if self._training.remat == "auto" else self._training.remat
        rate = 0.0 if self._lora is None else self._lora.dropout

        def loss(trainable: Params, base: Params, micro: RowsMicroBatch) -> tuple[Mean, Metrics, None]:
            left_out = None if not rate or micro.key is None else dropout(micro.key, micro.batch, rate=rate)
            params, adapter = self._student(trainable["student"], base["student"], left_out)
            parts = self._parts(params, adapter, base["teacher"], trainable["projections"], micro.batch, remat)
            mask = jnp.asarray(micro.batch.mask)
            count = jnp.sum(mask, dtype=jnp.float32)
            sums = {name: jnp.sum(clean(values, mask)) for name, (_, values) in parts.items()}
            mean = Mean(sum((factor * sums[name] for name, (factor, _) in parts.items() if factor), start=jnp.zeros(())), count)
            metrics: Metrics = {"policy/loss": mean}
            metrics |= {MEASURED[name]: Mean(total, count) for name, total in sums.items()}
            return mean, metrics, None

        return loss

    def _student(self, trained: Params, base: Params | None, left_out: Any) -> tuple[Params, Adapter | None]:
        if base is None or self.scale is None:
            return trained, None
        return base, Adapter(trained, self.scale, left_out)

    def _parts(
        self, params: Params, adapter: Adapter | None, teacher: Params, projections: Params, batch: TokenBatch, remat: Any
    ) -> dict[str, tuple[float, Float[Array, "R M"]]]:
        """By name: the factor, and the value of each trained token."""
        options, config = self.options, self.model.config
        tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
        rule = Visibility(jnp.asarray(batch.segments), jnp.asarray(batch.parents))
        through = partial(forward_with_states, tokens=tokens, positions=positions, visibility=rule, precision=self.precision)
        final, states = through(config, params, adapter=adapter, remat=remat)
        known, theirs = jax.lax.stop_gradient(through(self.teacher_config, teacher))
        at = jnp.asarray(batch.columns)[..., None]  # where a token is predicted
        compared = partial(jnp.take_along_axis, indices=at, axis=1)
        head_fn = None
        if options.divergence is not None:
            how = {"kind": options.divergence, "beta": options.beta, "temperature": options.temperature, "top_k": options.top_k}
            head_fn = teacher_head(**how, logit_cap=self.teacher_config.logit_cap)
        head = HeadOptions(
            chunk=self._training.head_chunk,
            precision=self.precision,
            train_head=self.scale is None,
            head_fn=head_fn,
            head_fn_gradient=head_fn is not None,
            logit_cap=config.logit_cap,
        )
        shared = None if head_fn is None else head_matrix(self.teacher_config, teacher)
        aux = None if head_fn is None else compared(known)
        logps, extras = target_scores(final, head_matrix(config, params), batch, options=head, aux=aux, shared=shared)
        parts: dict[str, tuple[float, Float[Array, "R M"]]] = {"nll": (options.nll, -logps)}
        if head_fn is not None:
            parts["divergence"] = (options.weight, extras["divergence"])
        if options.features is not None:
            found = [
                self._feature_distance(i, layer, states, theirs, projections, compared) for i, layer in enumerate(options.features.layers)
            ]
            parts["features"] = (options.features.weight, sum(found, start=jnp.zeros(logps.shape)) / len(found))
        if options.attention is not None:
            found = [self._map_distance(layer, states, theirs, compared, batch) for layer in options.attention.layers]
            parts["attention"] = (options.attention.weight, sum(found, start=jnp.zeros(logps.shape)) / len(found))
        return parts

    def _layer_pair(self, layer: int) -> tuple[int, int]:
        own, others = self.model.config.num_layers, self.teacher_config.num_layers
        return layer % own, same_depth(layer, own, others)

    def _feature_distance(self, i: int, layer: int, states: Array, theirs: Array, projections: Params, compared: Any) -> Array:
        own, other = self._layer_pair(layer)
        student, teacher = compared(states[own]), compared(theirs[other])
        if projections:
            return direction_distance(student @ projections[str(i)], teacher)
        if student.shape[-1] < teacher.shape[-1]:
            return direction_distance(student, teacher @ pooling(teacher.shape[-1], student.shape[-1]))
        return direction_distance(student @ pooling(student.shape[-1], teacher.shape[-1]), teacher)

    def _map_distance(self, layer: int, states: Array, theirs: Array, compared: Any, batch: TokenBatch) -> Array:
        """Of a sequence's two maps, each of length 1, the squared distance; spread over its tokens so that their mean is it."""
        own, other = self._layer_pair(layer)

        def sized(states: Array) -> Array:
            found = clean(activity(compared(states)), jnp.asarray(batch.mask))
            length = jnp.sqrt(answer_sums(batch, jnp.square(found)) + 1e-12)
            return found / jnp.take(length, jnp.asarray(batch.sequences))

        apart = jnp.square(sized(states[own]) - sized(theirs[other]))
        return apart * jnp.asarray(batch.sequence_tokens).astype(jnp.float32)
