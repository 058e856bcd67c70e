"""Every option of a run on rows of data: what `burnish sft`, `dpo`, `distill` and `reward-model` read.

Owns their configurations and the sections that they don't share with reinforcement learning. `loader.py` merges and reports as for
`Config`. A field that nothing reads must not exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from burnish.config import documents
from burnish.config.distillation import DistillationSection, DistillationTeacherSection
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.preference import AnyPreferenceConfig, SigmoidConfig
from burnish.config.schema import CheckpointSection, Config, DataSection, MeshSpec, ModelSection, RunSection
from burnish.config.section import Many, Positive, Section


class RowsTrainingConfig(Section):
    """Sizes (in rows of data), the optimizer, and how long. A step is one update."""

    max_steps: Positive = 100
    """Updates; fewer where `data.epochs` ends before."""
    batch_size: Positive = 8
    """Rows for each update."""
    max_tokens: Positive = 1024
    """Longest sequence of a row, in tokens after the chat template."""
    overlong: Literal["drop", "cut", "error"] = "drop"
    """A row with a longer one: left out and counted, its end cut off, or an error before training."""
    tokens_per_device: Positive | None = None
    """Tokens in one forward-backward pass, for each device that rows are spread over; micro-batches follow from it, rows of data are
    packed. Null: as many as one row of data can have."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    """Optimizer and schedule."""
    remat: bool | Literal["auto", "nested"] = "auto"
    """Recompute each layer in the backward pass; `nested` keeps fewer layers' inputs for one more forward pass. `auto`: true when every
    weight is trained."""
    head_chunk: Positive = 512
    """Tokens whose logits exist at one time."""
    eval_every: Positive | None = None
    """Evaluate every so many steps; null never."""
    compare: bool = False
    """Evaluate before the first and after the last step, and show both."""
    max_nonfinite_updates: Positive = 3
    """Non-finite updates in a row (each skipped and counted) after which the run stops."""


class SFTTrainingConfig(RowsTrainingConfig):
    """Sizes (in rows of data), the optimizer, and how long. A step is one update."""

    balance: Annotated[float, Field(ge=0)] | None = None
    """Factor on the loss that balances the load of experts over a whole update, as `router_aux_loss_coef` of a model's config counts it; 0
    for none; null: the model's own. Routers beside an adapter are frozen, and then there is none."""
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Size of the noise on the embeddings while training (NEFTune, Jain et al., 2023, arXiv:2310.05914); null adds none."""


class PreferenceTrainingConfig(RowsTrainingConfig):
    """Sizes (in rows of data), the optimizer, and how long. A step is one update."""

    balance: Annotated[float, Field(ge=0)] | None = None
    """Factor on the loss that balances the load of experts over a whole update, as `router_aux_loss_coef` of a model's config counts it; 0
    for none; null: the model's own. Routers beside an adapter are frozen, and then there is none."""
    precompute_reference: bool = False
    """Score every row by the reference once, before training; then no weights of the reference are kept. Else each update scores its
    rows."""


class RewardTrainingConfig(RowsTrainingConfig):
    """Sizes (in rows of data), the optimizer, and how long. A step is one update."""

    centering: Annotated[float, Field(ge=0)] = 0.0
    """Factor on the square of a pair's summed scores, which holds them around 0 (Eisenstein et al., 2023, arXiv:2312.09244)."""


class TrainedClusterSection(Section):
    """Which devices train."""

    actor: MeshSpec = MeshSpec()
    """Devices of the trained model; null axes and devices are one device."""

    @model_validator(mode="after")
    def _has_devices(self) -> TrainedClusterSection:
        if self.actor.count is None:
            raise ValueError("`actor` can't be placed by another role, as there is none: give it `axes` or `devices`")
        return self


class ProgressSection(Section):
    """What is shown and written while the run goes on."""

    progress: bool = True
    """Draw the progress display when the output is a terminal; otherwise print one line a step."""
    trace_mib: Annotated[int, Field(ge=0)] = 48
    """Most that `trace.pftrace`, the timeline of the run, may take on disk, in MiB: past half of it the older part gives way. 0 writes
    none."""
    trackers: Many[Literal["tensorboard", "wandb", "trackio", "mlflow", "otel"]] = ()
    """Where metrics go too, and spans: `otel` sends those of the trace to an OpenTelemetry collector. Each needs its package. Projects,
    servers and offline modes are set by the trackers' own environment variables. One that fails or hangs doesn't hold up the run."""
    profile: Annotated[str, Field(pattern=r"^[1-9]\d*-[1-9]\d*$")] | None = None
    """Steps over which JAX's profiler runs, `3-5`, both ends included; what it writes goes to `profile/`. It costs time and disk: null."""


class RowsConfig(Section):
    """What all of them have."""

    model: ModelSection = ModelSection()
    """Which weights, at what precision, trained how."""
    data: DataSection = DataSection()
    """Where rows come from and which are used."""
    cluster: TrainedClusterSection = TrainedClusterSection()
    """Which devices train."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is saved, when."""
    observe: ProgressSection = ProgressSection()
    """What is shown and written while the run goes on."""
    run: RunSection = RunSection()
    """Identity of the run."""


class SFTConfig(RowsConfig):
    """One supervised run, `burnish sft`."""

    training: SFTTrainingConfig = SFTTrainingConfig()
    """Sizes (in rows of data), the optimizer, and how long."""


class PreferenceConfig(RowsConfig):
    """One preference run, `burnish dpo`."""

    loss: AnyPreferenceConfig = SigmoidConfig()
    """What is learned from a row; its `name` decides which other options there are."""
    training: PreferenceTrainingConfig = PreferenceTrainingConfig()
    """Sizes (in rows of data), the optimizer, and how long."""


class DistillationConfig(RowsConfig):
    """One run of distillation from a teacher's numbers, `burnish distill`."""

    teacher: DistillationTeacherSection = DistillationTeacherSection()
    """Whom the student, `model`, learns from."""
    distillation: DistillationSection = DistillationSection()
    """What it learns."""
    training: RowsTrainingConfig = RowsTrainingConfig()
    """Sizes (in rows of data), the optimizer, and how long."""


class RewardModelConfig(RowsConfig):
    """One run that makes a reward model, `burnish reward-model`."""

    training: RewardTrainingConfig = RewardTrainingConfig()
    """Sizes (in rows of data), the optimizer, and how long."""


RowsRunConfig = SFTConfig | PreferenceConfig | DistillationConfig | RewardModelConfig
RunConfig = Config | RowsRunConfig
CONFIGS: dict[str, type[RunConfig]] = {
    "train": Config,
    "sft": SFTConfig,
    "dpo": PreferenceConfig,
    "distill": DistillationConfig,
    "reward-model": RewardModelConfig,
}
"""By the command that reads it."""


def command_of(run: Path) -> str:
    """Which command a run's folder is of, by the keys of the configuration that it kept. Raises UserError where there is none."""
    try:
        kept = documents.read(run / "config.yaml").values
    except documents.DocumentError as error:
        raise UserError(f"{run / 'config.yaml'} {error}: a run's folder has the configuration that it was made from") from error
    sections, training = kept.keys(), kept.get("training", {})
    if "algorithm" in sections:
        return "train"
    if "distillation" in sections:
        return "distill"
    if "loss" in sections:
        return "dpo"
    return "reward-model" if "centering" in training else "sft"
