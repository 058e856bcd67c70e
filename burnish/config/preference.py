"""The options of each preference loss: one model a name. What they compute is `train.preference`; `loss.name` chooses the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from burnish.config.section import Section

Beta = Annotated[float, Field(gt=0)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
Weight = Annotated[float, Field(ge=0)]


class NormalisedConfig(Section):
    """Fields of the losses that compare log-ratios to a reference."""

    beta: Beta = 0.1
    """Factor on the difference of log-ratios: large values hold the policy near its reference."""
    length_normalised: bool = False
    """Divide each answer's log-ratio by its tokens; β is per token then, and 2 or more is usual."""


class SigmoidConfig(NormalisedConfig):
    """Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290); with label smoothing, cDPO."""

    name: Literal["sigmoid"] = "sigmoid"
    """The loss."""
    label_smoothing: Smoothing = 0.0
    """Probability that a label is wrong (Mitchell, 2023)."""


class RobustConfig(NormalisedConfig):
    """DPO without bias under flipped labels (Ray Chowdhury et al., 2024, arXiv:2403.00409)."""

    name: Literal["robust"] = "robust"
    """The loss."""
    label_smoothing: Smoothing = 0.1
    """Probability that a label is wrong."""


class IPOConfig(NormalisedConfig):
    """A target for the difference of log-ratios, 1 / 2β (Azar et al., 2023, arXiv:2310.12036)."""

    name: Literal["ipo"] = "ipo"
    """The loss."""


class HingeConfig(NormalisedConfig):
    """No gradient once the difference is 1 / β (Zhao et al., 2023, arXiv:2305.10425)."""

    name: Literal["hinge"] = "hinge"
    """The loss."""


class SimPOConfig(Section):
    """Mean log-probs and a margin, without a reference (Meng et al., 2024, arXiv:2405.14734)."""

    name: Literal["simpo"] = "simpo"
    """The loss."""
    beta: Beta = 2.0
    """Factor on the difference of mean log-probs."""
    margin: Weight = 1.0
    """By how much that product must be above 0 (γ in the paper)."""
    label_smoothing: Smoothing = 0.0
    """Probability that a label is wrong."""


class CPOConfig(Section):
    """Log-probs without a reference, and the chosen's likelihood beside them (Xu et al., 2024, arXiv:2401.08417)."""

    name: Literal["cpo"] = "cpo"
    """The loss."""
    beta: Beta = 0.1
    """Factor on the difference of log-probs."""
    nll: Weight = 1.0
    """Weight of the chosen's negative log-likelihood a token."""
    label_smoothing: Smoothing = 0.0
    """Probability that a label is wrong."""


class ORPOConfig(Section):
    """The chosen's likelihood, and the odds ratio beside it (Hong et al., 2024, arXiv:2403.07691)."""

    name: Literal["orpo"] = "orpo"
    """The loss."""
    beta: Beta = 0.1
    """Weight of the odds ratio's term (λ in the paper)."""
    nll: Weight = 1.0
    """Weight of the chosen's negative log-likelihood a token."""


class KTOConfig(Section):
    """Answers one by one, each wanted or not: rows of `prompt`, `completion`, `label` (Ethayarajh et al., 2024, arXiv:2402.01306)."""

    name: Literal["kto"] = "kto"
    """The loss."""
    beta: Beta = 0.1
    """Factor on an answer's log-ratio, less the reference point."""
    desirable_weight: Weight = 1.0
    """Weight of the answers that are wanted (λ_D in the paper)."""
    undesirable_weight: Weight = 1.0
    """Weight of the others (λ_U)."""


AnyPreferenceConfig = Annotated[
    SigmoidConfig | RobustConfig | IPOConfig | HingeConfig | SimPOConfig | CPOConfig | ORPOConfig | KTOConfig, Field(discriminator="name")
]
