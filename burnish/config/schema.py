"""Every option of a run, as frozen models: name, type, default, bounds and meaning.

Owns the shape of a configuration; merging sources and reporting mistakes is `loader.py`. The command line and Python build the same
models. A field that nothing reads must not exist.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from burnish.config.algorithms import AnyAlgorithmConfig, GRPOConfig
from burnish.config.engines import read_options
from burnish.config.optimizer import OptimizerConfig
from burnish.config.section import Many, Positive, Section

LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]


class LoraConfig(Section):
    """A low-rank adapter beside the frozen base (Hu et al., 2021, arXiv:2106.09685)."""

    rank: Positive = 16
    """Rank r of the update B·A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / √rank instead (rank-stabilised, Kalajdzievski, 2023, arXiv:2312.03732): high ranks learn as low ones do."""
    dora: bool = False
    """Learn each column's size beside its direction, which the low-rank update turns (DoRA, Liu et al., 2024, arXiv:2402.09353)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the numbers that an adapter reads which are left out while training, others for each step, layer, matrix and token."""
    targets: Many[LoraTarget] = ("q", "k", "v", "o", "gate", "up", "down")
    """Which matrices of each layer get an adapter."""
    path: str | None = None
    """A folder with an adapter in PEFT's format to start from, which must agree with the options above (`dropout` aside); then the base
    with that adapter is also the reference. Null: a fresh one, which changes nothing yet."""
    quantize: Literal["int8", "int4", "nf4"] | None = None
    """Keep the frozen base's matrices in 8 or 4 bits and the rest of it in bf16 (QLoRA, Dettmers et al., 2023, arXiv:2305.14314); null
    keeps all of it in f32."""

    @property
    def scale(self) -> float:
        """The factor on the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class ModelSection(Section):
    """Which weights, at what precision, trained how."""

    path: str = ""
    """A Hugging Face folder, a name from `burnish fetch`, or a hub id (extra `hf`)."""
    precision: Literal["auto", "f32", "bf16"] = "auto"
    """Products in f32, or bf16 operands with f32 results. `auto`: bf16 where the hardware multiplies it natively, else f32."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter; null trains every weight."""


class SourceConfig(Section):
    """One source of prompts in a mixture."""

    path: str | None = None
    """A .jsonl or .parquet file."""
    recipe: str | None = None
    """A Python module or file with `create_dataset(**options)`, e.g. `recipes/chain_sum.py` or `my_pkg.data:create_dataset`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `create_dataset`, checked against its signature."""
    name: str | None = None
    """What prompt ids, their order and their seeds derive from; null takes `path` or `recipe` as it is written here. The options are
    added to it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of this source in the mixture, relative to the others."""

    @model_validator(mode="after")
    def _one_kind(self) -> SourceConfig:
        if (self.path is None) == (self.recipe is None):
            raise ValueError("a source needs exactly one of `path` and `recipe`")
        return self


class DataSection(Section):
    """Where prompts come from and which are used."""

    train: Many[SourceConfig] = ()
    """Sources of training prompts; several are mixed by weight."""
    eval: Many[SourceConfig] = ()
    """Sources of held-out prompts; read to their end, never mixed or shuffled."""
    prompt_key: str = "prompt"
    """The column that holds the prompt: a string (one user message) or a list of messages."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own."""
    shuffle: bool = True
    """Draw training prompts in a random order that depends on `run.seed` and the epoch only."""
    epochs: Positive | None = None
    """Passes over the training data; null goes round until `training.max_steps`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, e.g. `enable_thinking: false`."""

    @model_validator(mode="after")
    def _held_out_prompts_are_not_mixed(self) -> DataSection:
        if any(source.weight != 1 for source in self.eval):
            raise ValueError("`weight` mixes training sources; those of `eval` are read to their end, so it would do nothing there")
        return self


class RewardConfig(Section):
    """One reward function."""

    fn: str
    """`exact`, `numeric`, `boxed` … of `burnish.rewards`, or `my_pkg.mod:fn`, or `./file.py:fn`."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword options bound to the function, checked against its signature."""
    timeout_s: Annotated[float, Field(gt=0)] | None = 60.0
    """Longest time for one group, in seconds; after it the group has no reward (status `grader_error`). Null waits for ever."""


class RewardModelSection(Section):
    """A model that scores whole conversations, in one weighted sum with the reward functions."""

    path: str
    """A Hugging Face folder of a sequence classifier with one label, its tokenizer and its chat template; or a hub id."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    micro_batch_size: Positive = 8
    """Conversations in one compiled pass; those of one group, so the size of a group or a divisor of it fills it best."""
    max_tokens: Positive | None = None
    """Longest conversation in the model's own tokens; a longer one gets no score, and is counted. Null means all that it has positions
    for."""


Seconds = Annotated[float, Field(gt=0)]


class EpisodeLimits(Section):
    """What ends an episode before its environment does. A limit of null is none, by choice."""

    max_turns: Positive = 32
    """Turns of an episode; after them it is truncated. An environment that is given `max_steps` of its own keeps those."""
    max_tokens: Positive | None = None
    """Ids sampled in all turns together; the last turn is cut to what is left, then the episode is truncated. Null: only
    `rollout.max_episode_tokens` bounds them."""
    step_timeout_s: Seconds | None = 60.0
    """Longest call of an environment, reset and close included, in seconds; after it the episode has the status `env_timeout`."""
    episode_timeout_s: Seconds | None = None
    """Longest episode, sampling included, in seconds; after it the episode has the status `env_timeout`."""
    lost_after_s: Seconds | None = 3600.0
    """An episode from which nothing has come for so long is lost, in seconds: it is played again, once, and then counted and left out."""
    max_worker_deaths: Annotated[int, Field(ge=0)] | None = 20
    """How many worker processes may die by themselves in a run (killed from outside, out of memory, crashed). An episode whose worker
    died is played again, once; the next death beyond this ends the run. Null never does. Those that hung and were killed don't count."""
    max_concurrency: Positive | Literal["adaptive"] | None = None
    """Episodes that play at one time; null: 4 for each of the engine's slots, so that it has work while environments wait. `adaptive`: one
    for each slot, and more, up to 16, while the engine has room and episodes wait to begin."""


class RayConfig(Section):
    """Worker processes on the machines of a Ray cluster, in place of this one's: where plain environments, tools and rewards run."""

    address: str = "auto"
    """Of the cluster, as `ray.init` takes it; `auto`: the one that this machine is part of."""
    workers: Positive = 64
    """Most workers at one time for environments, and as many for tools and rewards; each keeps its actor while the run lasts."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Of Ray's CPUs that each worker takes up."""


class EnvironmentSection(Section):
    """The world an episode plays in."""

    env: str = "TaskEnvironment"
    """An environment class of `burnish.agentic.worlds`, or `my_pkg.mod:Class`, or `./file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    limits: EpisodeLimits = EpisodeLimits()
    """What ends an episode before its environment does."""
    ray: RayConfig | None = None
    """Run workers on a Ray cluster; null: on this machine. Needs the extra `ray` (docs/scale.md)."""


class AgentSection(Section):
    """What turns messages into actions."""

    agent: str = "ModelAgent"
    """An agent class of `burnish.agentic.agents`, or `my_pkg.mod:Class`, or `./file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class SamplingConfig(Section):
    """How completions are sampled."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of ids with this probability mass; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest ids; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep ids at least this likely relative to the likeliest; 0 keeps all."""
    max_tokens: Positive = 256
    """Longest completion, in tokens, the stop id included."""
    stop_strings: Many[str] = ()
    """Texts that end a completion when they appear in it."""


class EvalSamplingConfig(Section):
    """How held-out prompts are sampled. What isn't here is as in `rollout.sampling`."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    max_tokens: Positive | None = None
    """Longest completion; null means `rollout.sampling.max_tokens`."""


class RolloutConfig(Section):
    """The engine that samples, and its limits."""

    engine: str = "native"
    """Which engine: `native`, `vllm`, `sglang`, `burnish`, `scripted`, or a class of your own, `my_pkg.mod:Engine` or
    `./file.py:Engine`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of an engine that isn't native: below, and `docs/engines.md`; of your own those that its class takes."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens after the chat template."""
    max_episode_tokens: Positive | None = None
    """Longest row of an episode: its prompt, all its turns and what the environment said between them. Null: `max_prompt_tokens` and one
    completion, which is enough for one turn."""
    overlong_prompts: Literal["drop", "error", "left"] = "drop"
    """A longer prompt: dropped and counted, an error before training, or its last tokens kept (a BOS stays in front)."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training episodes."""
    evaluation: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of held-out episodes."""
    slots: Positive = 64
    """Sequences that decode together; one compiled shape. Of servers: requests that each is given at one time."""
    prefill_rows: Positive = 8
    """Pages of 64 prompt tokens in one compiled prefill call; a long prompt takes several."""
    decode_chunk: Positive = 16
    """Tokens decoded between two looks at the queue."""
    max_kept: Positive = 512
    """Largest support of a truncated distribution (top-p, top-k, min-p are cut to the likeliest `max_kept` ids)."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many versions of the weights sampling may be behind the trainer. 0: a step's episodes begin when the step before is done, and
    updates are repeatable bit by bit. k: they may begin k steps earlier, so that sampling and training overlap; ratios are then taken
    to the policy that the step began with, and `algorithm.importance` corrects for the older sampler."""
    kv_cache_bytes: Positive | None = None
    """Most bytes of keys and values on each device: of running requests, and, where these leave room, of prefixes kept for later. Where
    running ones need more, the youngest waits on the host. Null: whole contexts for all slots, and half as much for prefixes."""
    in_flight: Literal["finish", "recompute", "keep"] = "finish"
    """What becomes of running requests when weights change. `finish`: they end on the old ones, and the update waits. Else they go on under
    the new ones at once: `recompute` prefills again what they have so far; `keep` doesn't, so that their log-probs are those of no version,
    and nothing about them is exact."""
    weights: Literal["copy", "lent"] = "copy"
    """What the engine samples from: a copy in the layout that decodes fastest, or `lent`: the actor's own arrays, at no memory but slower.
    Lent ones need the actor's mesh, float32, no adapter, one mini-batch a step, and `max_staleness` 0."""

    replay: str | None = None
    """A run's folder, made with `observe.episodes`: its training episodes are read instead of sampled, so that its updates are made again
    bit by bit, whatever `max_staleness` was. Data, seed and sizes must be that run's."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest row that a model may have to read at once."""
        return self.max_episode_tokens or self.max_prompt_tokens + self.sampling.max_tokens

    @model_validator(mode="after")
    def _the_engine_takes_its_options(self) -> RolloutConfig:
        read_options(self.engine, self.options)
        if self.engine != "native" and self.weights == "lent":
            raise ValueError(f"`weights: lent` lends the actor's arrays, which the engine `{self.engine}` can't borrow: leave it at `copy`")
        return self

    @model_validator(mode="after")
    def _an_episode_holds_its_prompt(self) -> RolloutConfig:
        if self.max_episode_tokens is not None and self.max_episode_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"`max_episode_tokens` is {self.max_episode_tokens} and a prompt may have `max_prompt_tokens` {self.max_prompt_tokens}: an "
                "episode needs room for what is sampled after it"
            )
        return self

    @model_validator(mode="after")
    def _lent_weights_wait(self) -> RolloutConfig:
        if self.weights == "lent" and self.in_flight != "finish":
            raise ValueError(
                f"`weights: lent` can't change under running requests, and `in_flight: {self.in_flight}` wants that: set one of them back"
            )
        return self


RoleName = Literal["actor", "rollout", "reference", "critic", "reward", "teacher"]


class MeshSpec(Section):
    """Devices for a role, and how they are arranged. What follows from a null: `docs/placement.md`."""

    axes: dict[Literal["data", "fsdp", "tp"], Positive] | None = None
    """Axis names and sizes, outermost first. Null: all devices on `data`; for the rollout as many on `tp` as divide the model."""
    devices: (
        Positive | Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Annotated[str, Field(pattern=r"^\d+-\d+$")] | None
    ) = None
    """How many devices, of those that no other role takes; or which: a list of indices among this process's devices, or `4-7`, both ends
    included. Null: as many as `axes` needs."""
    same_as: RoleName | None = None
    """The devices and axes of another role; then nothing else is set here."""
    same_devices_as: RoleName | None = None
    """The devices of another role, with `axes` of its own."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> MeshSpec:
        others = [name for name in ("axes", "devices", "same_devices_as") if getattr(self, name) is not None]
        if self.same_as is not None and others:
            raise ValueError(f"`same_as: {self.same_as}` says all; `{'`, `'.join(others)}` beside it can't hold: set one or the other")
        if self.same_devices_as is not None and self.devices is not None:
            raise ValueError(f"`same_devices_as: {self.same_devices_as}` and `devices: {self.devices}` both say which devices: set one")
        if (indices := self.indices) is not None and len({*indices}) < max(len(indices), 1):
            raise ValueError(f"`devices: {self.devices}` must name each device once, the lower end of a range first")
        if self.axes is not None and self.devices is not None and (count := math.prod(self.axes.values())) != self.count:
            raise ValueError(f"`axes` {self.axes} are {count} devices and `devices: {self.devices}` are {self.count}: make them agree")
        return self

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The devices that are named one by one; None where there is a count or nothing."""
        if isinstance(self.devices, str):
            first, last = map(int, self.devices.split("-"))
            return tuple(range(first, last + 1))
        return self.devices if isinstance(self.devices, tuple) else None

    @property
    def count(self) -> int | None:
        """How many devices this asks for; None where it is another role's number."""
        if self.same_as is not None or self.same_devices_as is not None:
            return None
        if self.devices is not None:
            return self.devices if isinstance(self.devices, int) else len(self.indices or ())
        return 1 if self.axes is None else math.prod(self.axes.values())


class DistributedConfig(Section):
    """Several operating system processes that make one run, each started with the same configuration. What is null is taken from the
    launcher, where jax knows it (Slurm, Kubernetes, Cloud TPU, Open MPI); docs/scale.md."""

    coordinator: str | None = None
    """Host and port at which process 0 is reached by all, e.g. `node0:8476`."""
    num_processes: Positive | None = None
    """How many there are."""
    process_id: Annotated[int, Field(ge=0)] | None = None
    """Which this is, from 0; another in each process, so best set by the environment, `BURNISH__CLUSTER__DISTRIBUTED__PROCESS_ID`."""
    heartbeat_timeout_s: Annotated[float, Field(ge=1)] = 100.0
    """Seconds without a word after which a process counts as gone and all others end."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> DistributedConfig:
        if self.num_processes is not None and self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"`process_id` is {self.process_id}, but of {self.num_processes} processes the last is {self.num_processes - 1}"
            )
        return self


class ClusterConfig(Section):
    """Which role lives where. A role that isn't given lives where the actor does."""

    distributed: DistributedConfig | None = None
    """The processes of the run; null is one. Then `axes` of actor, critic and reference are those of a mesh over all processes' devices,
    `devices` everywhere those of each process; the engine and the reward model are each process's own."""

    actor: MeshSpec = MeshSpec()
    """Devices of the trained policy; null axes and devices are one device."""
    rollout: MeshSpec | None = None
    """Devices of the engine. Null: the actor's mesh; where that has an `fsdp` above 1 the same devices with axes of their own, since
    decoding from pieces would gather every weight for every token."""
    reference: MeshSpec | None = None
    """Devices of the weights that the policy is compared with; null: the actor's mesh."""
    critic: MeshSpec | None = None
    """Devices of the critic; null: the actor's mesh."""
    reward: MeshSpec | None = None
    """Devices of the reward model; null: the actor's mesh."""
    teacher: MeshSpec | None = None
    """Devices of the teacher; null: the actor's mesh."""
    offload_to_cpu: Many[Literal["actor", "reference", "critic", "reward", "teacher"]] = ()
    """Roles whose arrays wait in the host's memory while nothing needs them: of the actor its optimizer's state, of the others all. Results
    are the same, each phase begins and ends with a copy."""
    canary: bool = False
    """After each sync, sample a few ids after a fixed prompt and stop the run if the trained policy gives them other log-probs. The metrics
    `mismatch/…` say the same of every batch, a step later and at no cost."""

    @model_validator(mode="after")
    def _leads_to_devices(self) -> ClusterConfig:
        if self.actor.count is None:
            raise ValueError("`actor` can't be placed by another role: the others follow it, so give it `axes` or `devices`")
        for start in ("rollout", "reference", "critic", "reward", "teacher"):
            path = [start]
            while (spec := getattr(self, path[-1])) is not None and (following := spec.same_as or spec.same_devices_as) is not None:
                if following in path:
                    raise ValueError(f"`{' -> '.join([*path, following])}` goes round: one of them needs devices, or the actor's")
                path.append(following)
        return self


class TrainingConfig(Section):
    """Sizes (in prompts), the optimizer, and how long."""

    max_steps: Positive = 100
    """Steps: times that a new version of the weights is published."""
    batch_size: Positive = 8
    """Prompts drawn for each step."""
    mini_batch_size: Positive | None = None
    """Prompts for each update; divides `batch_size`; null means `batch_size`."""
    train_micro_batch_size: Positive | None = None
    """Prompts in one forward-backward pass; divides `mini_batch_size`; null means `mini_batch_size`."""
    tokens_per_device: Positive | None = None
    """Tokens in one forward-backward pass, for each device that rows are spread over: micro-batches follow from it, as many as a
    mini-batch's lengths need. In place of `train_micro_batch_size`; at least a whole context, `rollout.max_prompt_tokens` +
    `rollout.sampling.max_tokens`."""
    rollout_micro_batch_size: Positive | None = None
    """Prompts handed to the engine together; divides `batch_size`; null means `batch_size`."""
    compute_logps_micro_batch_size: Positive | None = None
    """Prompts in one pass that scores log-probs of the old policy or the reference, a matter of memory only; divides `mini_batch_size`;
    null means `train_micro_batch_size`. Not with `tokens_per_device`, which cuts these passes too."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    remat: bool | Literal["auto", "nested"] = "auto"
    """Recompute each layer in the backward pass; `nested` keeps fewer layers' inputs for one more forward pass. `auto`: true when every
    weight is trained."""
    head_chunk: Positive = 512
    """Tokens whose logits exist at one time."""
    balance: Annotated[float, Field(ge=0)] | None = None
    """Factor on the loss that balances the load of experts over a whole update, as `router_aux_loss_coef` of a model's config counts it; 0
    for none; null: the model's own. Routers beside an adapter are frozen, and then there is none."""
    eval_every: Positive | None = None
    """Evaluate every so many steps; null never."""
    compare: bool = False
    """Evaluate before the first and after the last step, greedy and at the training temperature with the same seeds, and show both."""
    max_nonfinite_updates: Positive = 3
    """Non-finite updates in a row (each skipped and counted) after which the run stops."""

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> TrainingConfig:
        for name in ("train_micro_batch_size", "compute_logps_micro_batch_size"):
            size = getattr(self, name)
            if self.tokens_per_device is not None and size is not None:
                raise ValueError(
                    f"`tokens_per_device` is {self.tokens_per_device} and `{name}` is {size}: both say how a mini-batch is cut, so set one "
                    "of them to null"
                )
        return self


class KeepBestConfig(Section):
    """Which checkpoints are too good to be deleted."""

    metric: str
    """A metric of the step or of its evaluation, e.g. `eval/greedy/accuracy` or `reward/mean`; a step without it is no candidate."""
    mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""
    count: Positive = 1
    """How many of the best are kept."""


class CheckpointSection(Section):
    """What is saved, when, and what is kept. The last step is always saved, and so is the step at which a signal stops the run."""

    every: Positive | None = None
    """Save every so many steps; null doesn't."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Save at the first step's end that comes so long after the last save, in minutes; null doesn't."""
    keep_last: Positive | None = 3
    """How many of the newest are kept; null keeps all there are, and then the two below have nothing to add."""
    keep_every: Positive | None = None
    """Keep those of every so many steps too; null doesn't."""
    keep_best: KeepBestConfig | None = None
    """Keep the best by a metric too; null doesn't."""


class ObserveSection(Section):
    """What is shown and written while the run goes on."""

    sample_every: Positive = 5
    """Show one sampled completion with its reward every so many steps."""
    transcripts: bool = True
    """Write every episode of a step to `transcripts/step_N.jsonl`."""
    transcript_tokens: Annotated[int, Field(ge=0)] = 1024
    """Sampled tokens of an episode that are written one by one, with log-probs and advantages, for the report to colour; 0: none."""
    episodes: bool = False
    """Write every episode of a step, ids and log-probs and all, to `episodes/step_N.bin`, for `rollout.replay`."""
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


class RunSection(Section):
    """Identity of the run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    """Folder under `folder`; letters, digits, dot, dash and underscore."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Root of all randomness."""
    folder: str = "runs"
    """Where runs' folders are made."""


class Config(Section):
    """One run."""

    model: ModelSection = ModelSection()
    """Which weights, at what precision, trained how."""
    data: DataSection = DataSection()
    """Where prompts come from and which are used."""
    rewards: Many[RewardConfig] = ()
    """Reward functions; an episode's reward is their weighted sum."""
    reward_model: RewardModelSection | None = None
    """A model that scores whole conversations, in one weighted sum with the reward functions; null: none."""
    environment: EnvironmentSection = EnvironmentSection()
    """The world an episode plays in."""
    agent: AgentSection = AgentSection()
    """What turns messages into actions."""
    algorithm: AnyAlgorithmConfig = GRPOConfig()
    """What is learned from episodes; its `name` decides which other options there are."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that samples, and its limits."""
    cluster: ClusterConfig = ClusterConfig()
    """Which role lives on which devices."""
    training: TrainingConfig = TrainingConfig()
    """Sizes (in prompts), the optimizer, and how long."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is saved, when."""
    observe: ObserveSection = ObserveSection()
    """What is shown and written while the run goes on."""
    run: RunSection = RunSection()
    """Identity of the run."""
