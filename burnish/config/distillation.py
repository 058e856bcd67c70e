"""The options of distillation from a teacher's numbers, `burnish distill`. What they compute is `train.distillation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from burnish.config.section import Many, Positive, Section

Weight = Annotated[float, Field(ge=0)]


class DistillationTeacherSection(Section):
    """Whom the student learns from."""

    path: str = ""
    """A Hugging Face folder, a name from `burnish fetch`, or a hub id (extra `hf`), of the same tokenizer as the student."""


class FeaturesSection(Section):
    """Directions of the residual stream behind some layers, the teacher's in widths of the student's or the other way."""

    match: Literal["project", "pool"] = "project"
    """`project` learns a matrix from the student's features to the teacher's (Romero et al., 2014, arXiv:1412.6550), which isn't exported;
    `pool` takes means of neighbouring features of the wider one."""
    weight: Weight = 1.0
    """Factor on 1 - cosine, the mean over layers."""
    layers: Many[int] = (-1,)
    """Of the student, from 0, or from the end below 0; the teacher's are those of the same depth."""


class AttentionSection(Section):
    """Where in a sequence a layer's activations are large (Zagoruyko & Komodakis, 2016, arXiv:1612.03928)."""

    weight: Weight = 1.0
    """Factor on the squared distance of the two normalised maps of a sequence, the mean over layers."""
    layers: Many[int] = (-1,)
    """As for features."""


class DistillationSection(Section):
    """What the student learns of the teacher, token by token of what `burnish sft` would learn."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = "forward_kl"
    """Of the two distributions; null compares none."""
    weight: Weight = 1.0
    """Factor on it."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of the jsd: the teacher's share of the mixture that both are compared with."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both distributions are at this one."""
    top_k: Positive | None = None
    """Compare them over the ids that the teacher finds likeliest alone; null over all."""
    nll: Weight = 0.0
    """Weight of the data's own token, as in supervised training."""
    features: FeaturesSection | None = None
    """Learn directions of features too."""
    attention: AttentionSection | None = None
    """Learn where activations are large too."""

    @model_validator(mode="after")
    def _has_a_target(self) -> DistillationSection:
        if self.divergence is None and not self.nll and self.features is None and self.attention is None:
            raise ValueError("nothing is learned: give `divergence`, `nll`, `features` or `attention`")
        return self
