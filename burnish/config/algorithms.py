"""The options of each algorithm: one model a name, its defaults the paper's where they make sense here.

Owns names, defaults and bounds. What they mean as functions is `rl.algorithms`; the formulas stand in `rl.losses`, `rl.off_policy`,
`rl.advantages`. `algorithm.name` chooses the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from burnish.config.optimizer import OptimizerConfig
from burnish.config.section import Fraction, Positive, Section

Clip = Annotated[float, Field(gt=0)]
Level = Literal["token", "sequence", "geometric"]


class FunctionConfig(Section):
    """A function of the user's."""

    fn: str
    """`my_pkg.mod:fn` or `./file.py:fn`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options bound to the function, checked against its signature."""


class ImportanceConfig(Section):
    """Weights old / sampler on the policy loss, where the sampler isn't the anchor itself."""

    level: Level = "token"
    """Of each token; of the whole sequence (product of its tokens' ratios); or its geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Weights above `cap` become `cap`, or 0."""
    cap: Annotated[float, Field(gt=1)] = 2.0
    """Largest weight."""


class RejectionConfig(Section):
    """Leaves out, of loss and denominator, tokens whose ratio old / sampler has gone too far."""

    level: Level = "geometric"
    """What the ratio is of; a sequence's takes out all its tokens."""
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Smallest ratio that stays."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """Largest ratio that stays."""


class CriticConfig(Section):
    """The model of values, trained beside the policy."""

    path: str | None = None
    """A Hugging Face folder; a sequence-classification one brings its head, any other starts with a head of zeros. Null: `model.path`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """The critic's own optimizer and schedule."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which only the critic learns."""


class TeacherConfig(Section):
    """The model that a student learns from."""

    path: str = ""
    """A Hugging Face folder, a name from `burnish fetch`, or a hub id; its tokenizer must give every token the policy's id."""


class AlgorithmConfig(Section):
    """Fields that every policy-gradient algorithm shares."""

    num_generations: Positive = 8
    """Episodes for each drawn prompt: the size of a group, G."""
    num_iterations: Positive = 1
    """Passes over each batch of episodes (μ in the GRPO paper)."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference. 0 costs no reference pass."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference, per token (Schulman, 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL penalty to the loss, or take it from the rewards, where it has no gradient of its own."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, in nats a token, taken from the loss. 0 costs no gradient through it."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length_mean", "prompt_mean"] = "token_mean"
    """How per-token losses become one number; the denominator is global over the mini-batch."""
    fixed_length: Positive | None = None
    """The constant denominator of `fixed_length_mean`, in tokens a sequence; null means `rollout.sampling.max_tokens`."""
    train_truncated: bool = True
    """Whether episodes cut by a limit enter the baseline and the loss; false is DAPO's overlong filtering."""
    credit: Literal["trajectory", "turn", "return_to_go"] = "trajectory"
    """What a reward is credited to: the whole episode, the turn that earned it, or that turn and all before it."""
    gamma: Fraction = 1.0
    """Discount, per turn for `return_to_go`, per token for `ppo`, `reinforce_pp` and `on_policy_distillation`."""
    old: Literal["auto", "sampler", "recomputed"] = "auto"
    """The anchor of the ratio: the policy now for a single on-policy update, else scored before the step (`auto`); the sampler's own
    log-probs, without a pass; or always scored before the step."""
    importance: ImportanceConfig | None = ImportanceConfig()
    """Weights that correct for a sampler that isn't the anchor; null corrects nothing."""
    rejection: RejectionConfig | None = None
    """Which tokens or sequences are left out because sampler and anchor disagree; null leaves none out."""
    zero_signal: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rewards are all equal: kept in the denominators, left out, or replaced by other prompts. Always counted."""
    max_resample_rounds: Positive = 3
    """Times a step may sample in all, the first included, under `zero_signal: resample`."""
    on_shortage: Literal["error", "train_short"] = "error"
    """When those rounds gave too few groups: stop the run, or train on what is there and count what is missing."""
    advantage: FunctionConfig | None = None
    """Your own estimator of advantages in place of the algorithm's."""
    loss: FunctionConfig | None = None
    """Your own policy loss in place of the algorithm's."""

    @model_validator(mode="after")
    def _fixed_length_is_used(self) -> AlgorithmConfig:
        if self.fixed_length is not None and self.aggregation != "fixed_length_mean":
            raise ValueError("`fixed_length` goes with `aggregation: fixed_length_mean`, and only with it")
        return self


class ClippedConfig(AlgorithmConfig):
    """Fields of the algorithms whose loss is the clipped ratio."""

    epsilon: Clip = 0.2
    """Lower clip: ratios below 1 - epsilon carry no gradient where the advantage is negative."""
    epsilon_high: Clip | None = None
    """Upper clip (DAPO's clip-higher); null means `epsilon`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss, in advantages, where the advantage is negative and the ratio large; null sets none."""


class GRPOConfig(ClippedConfig):
    """Group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centred rewards by the group's standard deviation, by the mini-batch's, or not at all (Dr.GRPO)."""


class DrGRPOConfig(ClippedConfig):
    """GRPO without its two biases: no standard deviation, a constant length (Liu et al., 2025, arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """The algorithm."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length_mean", "prompt_mean"] = "fixed_length_mean"


class DAPOConfig(ClippedConfig):
    """Clip-higher, dynamic sampling, token mean, overlong filtering (Yu et al., 2025, arXiv:2503.14476).

    Its soft overlong punishment is a reward function: `rewards: [{fn: length_penalty, …}]`.
    """

    name: Literal["dapo"] = "dapo"
    """The algorithm."""
    epsilon_high: Clip | None = 0.28
    """Upper clip; null means `epsilon`."""
    train_truncated: bool = False
    zero_signal: Literal["keep", "drop", "resample"] = "resample"


class GSPOConfig(ClippedConfig):
    """Ratios of whole sequences (Zheng et al., 2025, arXiv:2507.18071)."""

    name: Literal["gspo"] = "gspo"
    """The algorithm."""
    level: Literal["sequence", "token"] = "sequence"
    """One gradient weight a sequence, or GSPO-token, whose advantages may differ within it."""
    epsilon: Clip = 3e-4
    epsilon_high: Clip | None = 4e-4
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length_mean", "prompt_mean"] = "sequence_mean"


class CISPOConfig(AlgorithmConfig):
    """The clipped ratio as a weight without gradient, so that no token loses its own (MiniMax-M1, 2025, arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """The algorithm."""
    epsilon: Fraction = 1.0
    """Weights below 1 - epsilon become that; 1 sets no lower bound."""
    epsilon_high: Clip = 4.0
    """Weights above 1 + epsilon_high become that."""


class RLOOConfig(ClippedConfig):
    """Each reward against the mean of its siblings' (Ahmadian et al., 2024, arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"
    """The algorithm."""


class ReinforcePPConfig(ClippedConfig):
    """REINFORCE++: no group baseline, advantages normalised over the mini-batch (Hu et al., 2025, arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """The algorithm."""
    baseline: bool = False
    """The variant that first takes the group's mean from each reward (REINFORCE++-baseline)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class SAPOConfig(AlgorithmConfig):
    """A soft gate on the ratio in place of the clip (Gao et al., 2025, arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    """The algorithm."""
    temperature_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness of the gate where it is negative."""


class DPPOConfig(AlgorithmConfig):
    """A mask by how far the probability has moved, in place of the ratio's clip (Qi et al., 2026, arXiv:2602.04879)."""

    name: Literal["dppo"] = "dppo"
    """The algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Distance between anchor and policy, of the sampled token against all others: total variation, or KL in nats."""
    threshold: Annotated[float, Field(gt=0)] | None = None
    """Tokens that moved farther in the direction of their advantage carry no gradient; null means 0.15 for tv, 0.05 nats for kl."""


class GMPOConfig(AlgorithmConfig):
    """The geometric mean of a sequence's clipped ratios (Zhao et al., 2025, arXiv:2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    """The algorithm."""
    log_clip: Clip = 0.4
    """Log-ratios are clipped at ± this, on the side where the advantage would push them farther."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length_mean", "prompt_mean"] = "sequence_mean"


class GDPOConfig(ClippedConfig):
    """Each reward function normalised in its group before they are summed (Liu et al., 2026, arXiv:2601.05242)."""

    name: Literal["gdpo"] = "gdpo"
    """The algorithm."""


class MaxRLConfig(ClippedConfig):
    """Advantages in units of the group's mean reward, for rewards of 0 and 1 (Tajwar et al., 2026, arXiv:2602.02710)."""

    name: Literal["maxrl"] = "maxrl"
    """The algorithm."""


class OnPolicyDistillationConfig(ClippedConfig):
    """A student's own samples, each token credited with how much likelier a teacher finds it (Lu et al., 2025, "On-Policy Distillation",
    Thinking Machines Lab; the objective is the reverse KL of arXiv:2306.13649 and arXiv:2306.08543). Needs no reward function."""

    name: Literal["on_policy_distillation"] = "on_policy_distillation"
    """The algorithm."""
    num_generations: Positive = 4
    """Episodes for each drawn prompt."""
    gamma: Fraction = 0.0
    """Discount per token: 0 credits a token with its own divergence only, 1 with that of all that follow too."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher."""


class PPOConfig(ClippedConfig):
    """Proximal policy optimisation with a critic (Schulman et al., 2017, arXiv:1707.06347)."""

    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    num_generations: Positive = 1
    """Episodes for each drawn prompt."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation (arXiv:1506.02438): 1 is Monte-Carlo, 0 one step."""
    whiten: bool = True
    """Advantages of a mini-batch are brought to mean 0 and deviation 1."""
    value_clip: Clip | None = 0.2
    """How far a value may move from the one that its mini-batch began with; null doesn't clip."""
    critic: CriticConfig = CriticConfig()
    """The critic."""


AnyAlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | DAPOConfig
    | GSPOConfig
    | CISPOConfig
    | RLOOConfig
    | ReinforcePPConfig
    | SAPOConfig
    | DPPOConfig
    | GMPOConfig
    | GDPOConfig
    | MaxRLConfig
    | OnPolicyDistillationConfig
    | PPOConfig,
    Field(discriminator="name"),
]
