"""The outer loop of reinforcement learning: a producer of batches, a trainer that drains them, an engine that gets the new weights.

Owns the loop, evaluation on its way, and the end in every case. The algorithm is a record of values (`rl.algorithms`), placement the
cluster's, episodes the orchestrator's. A *step* ends when the engine has a new version; an *update* is one optimizer call.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.agentic.agents import ConversationAgentBase, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, TaskEnvironment
from burnish.agentic.orchestrator import RolloutOrchestrator
from burnish.agentic.trajectory import EpisodeContext
from burnish.config.errors import UserError
from burnish.config.schema import GRPOConfig, RolloutConfig, RunSection, SamplingConfig, TrainingConfig
from burnish.data.stream import PromptStream
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.observe.metrics import MetricCollector
from burnish.observe.sinks import EvalReport, Sink, Sinks, StepReport
from burnish.observe.trace import span
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl.algorithms import Algorithm, from_config
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.cluster import RLCluster
from burnish.rl.evaluation import Evaluation, evaluate
from burnish.rl.handoff import Handoff, VersionGate
from burnish.rl.producer import Chunk, Producer
from burnish.rl.prompts import held_out_prompts, token_counter, training_stream
from burnish.rl.reports import record_rollout
from burnish.text.codec import Codec
from burnish.train.step import MicroBatch
from burnish.types import Group, Prompt, SamplingParams


@dataclass
class TrainResult:
    """What a run did: steps made, metrics of each, evaluations by step and label."""

    steps: int = 0
    history: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, Evaluation]] = field(default_factory=dict)


class RLLearner:
    """Trains a policy with any algorithm record.

    policy: an `RLCluster`, or a `Model` or a path, for which a cluster on the devices at hand is built (every weight is trained; for an
    adapter build the cluster with `lora=`). reward_fns: `fn(prompts, completions, **columns) -> list[float | None]`. train_ds: rows
    (mappings with a "prompt", or strings) or a `PromptStream`; eval_ds: rows or prompts, read to their end at each evaluation.
    agent_class, env_class: called with their kwargs for each episode; the environment gets the task first. training, rollout: options,
    where `policy` is no cluster, which has its own. run: name and seed. sinks: who hears of steps and evaluations.

    Data is checked before weights are loaded. `train` closes the learner and its cluster at the end, whatever the end is.
    """

    def __init__(
        self,
        policy: RLCluster | Model | str | Path,
        algorithm: Algorithm,
        *,
        reward_fns: Sequence[Callable[..., Any] | RewardSpec] = (),
        train_ds: PromptStream | Iterable[Any],
        eval_ds: Sequence[Prompt] | Iterable[Any] | None = None,
        agent_class: Callable[..., ConversationAgentBase] = ModelAgent,
        agent_kwargs: Mapping[str, Any] = {},
        env_class: Callable[..., BaseTaskEnv] = TaskEnvironment,
        env_kwargs: Mapping[str, Any] = {},
        training: TrainingConfig | None = None,
        rollout: RolloutConfig | None = None,
        run: RunSection | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if isinstance(policy, RLCluster) and (training is not None or rollout is not None):
            raise UserError("`training` and `rollout` belong to the cluster here: pass them to RLCluster(...)")
        self._training = policy.training_config if isinstance(policy, RLCluster) else training or TrainingConfig()
        self._rollout = policy.rollout_config if isinstance(policy, RLCluster) else rollout or RolloutConfig()
        self._run = run or RunSection()
        self._algorithm = algorithm
        self._plan = BatchPlan.from_config(self._training, algorithm)
        self._rewards = RewardManager([fn if isinstance(fn, RewardSpec) else RewardSpec.of(fn) for fn in reward_fns])
        self._make_agent = lambda: agent_class(**agent_kwargs)
        self._make_env = lambda prompt: env_class({**prompt.meta, "prompt": list(prompt.messages)}, **env_kwargs)
        count = token_counter(_codec(policy).template, self._make_agent) if env_class is TaskEnvironment else None
        limit = self._rollout.max_prompt_tokens
        self._stream = training_stream(
            train_ds, count_tokens=count, max_tokens=limit, seed=self._run.seed, batch_size=self._plan.batch_size
        )
        self._held_out = [] if eval_ds is None else held_out_prompts(eval_ds, count_tokens=count, max_tokens=limit)
        if self._training.eval_every is not None and not self._held_out:
            raise UserError(f"training.eval_every is {self._training.eval_every}, but there are no held-out prompts: give eval_ds (data.eval)")
        self.cluster = (
            policy
            if isinstance(policy, RLCluster)
            else RLCluster(policy, training=self._training, rollout=self._rollout, seed=self._run.seed)
        )
        self._sinks = Sinks(sinks)
        self._metrics = MetricCollector()
        self._orchestrator = RolloutOrchestrator(
            EpisodeContext(
                self.cluster.engine, self.cluster.model.codec.template, self.cluster.model.codec.tokenizer.decode, self.cluster.context
            ),
            self._rewards,
            make_agent=self._make_agent,
            make_env=self._make_env,
            max_concurrency=4 * self._rollout.slots,
        )
        self._closed = False

    # ---------------------------------------------------------------------------------------------------------------- the loop

    def train(self, *, on_step: Callable[[int], None] | None = None) -> TrainResult:
        """Run to `training.max_steps` or to the end of the data. `on_step(step)` is called after each step, before the next begins.

        Raises what the producer, a reward in the first batch, the engine or an update raised; the cluster is closed then too.
        """
        self._refuse_closed()
        plan, training = self._plan, self._training
        self.cluster.prepare(self._algorithm, total_updates=training.max_steps * plan.updates_per_step)
        handoff: Handoff[Chunk] = Handoff(plan.queue_size)
        gate = VersionGate()
        producer = Producer(
            stream=self._stream,
            orchestrator=self._orchestrator,
            algorithm=self._algorithm,
            plan=plan,
            params=self._params(self._rollout.sampling),
            handoff=handoff,
            gate=gate,
            seed=self._run.seed,
            steps=range(training.max_steps),
            rows_multiple=self.cluster.rows_multiple,
        )
        result = TrainResult()
        try:
            if training.compare:
                self._compare("before", 0, result)
            producer.start()
            while (first := handoff.get()) is not None:
                self._step(first, handoff, result)
                step = result.steps
                if training.eval_every is not None and step % training.eval_every == 0:
                    self._evaluate(f"step {step}", step, self._evaluation_samplings(), result)
                if on_step is not None:
                    on_step(step)
                gate.publish(self.cluster.version)
            if training.compare:
                self._compare("after", result.steps, result)
            return result
        finally:
            handoff.close()
            gate.close()
            self.close()
            if producer.ident is not None:
                producer.join()

    def _step(self, first: Chunk, handoff: Handoff[Chunk], result: TrainResult) -> None:
        """All updates of one step, then the engine's new weights and the step's report."""
        start, step, plan = time.monotonic(), result.steps + 1, self._plan
        groups: list[Group] = []
        waited = 0.0
        chunk: Chunk | None = first
        for _ in range(plan.updates_per_step):
            scored: dict[tuple[int, int, int], MicroBatch] = {}

            def micro_batches(scored: dict[tuple[int, int, int], MicroBatch] = scored) -> Iterator[MicroBatch]:
                nonlocal chunk, waited
                for _ in range(plan.accumulation_steps):
                    if chunk is None:
                        before = time.monotonic()
                        chunk = handoff.get()
                        waited += time.monotonic() - before
                    if chunk is None:
                        raise RuntimeError("the producer ended in the middle of a step")
                    if chunk.iteration == 0:
                        self._receive(chunk, groups)
                    micro = scored.get(chunk.key) or self._score(chunk)
                    scored[chunk.key] = micro
                    chunk = None
                    yield micro

            for _ in range(self._algorithm.num_iterations):
                with self._timed("update"):
                    metrics = self.cluster.update_actor(micro_batches(), count=plan.accumulation_steps, step=step)
                self._metrics.merge(metrics)
        with self._timed("sync"):
            self.cluster.sync_weights()
        result.steps = step
        self._report(step, groups, time.monotonic() - start, waited, result)

    def _receive(self, chunk: Chunk, groups: list[Group]) -> None:
        groups.extend(chunk.groups)
        record_rollout(
            self._metrics, chunk.groups, version=self.cluster.version, train_truncated=self._algorithm.train_truncated
        )
        self._metrics.sum("time/rollout_seconds", chunk.rollout_seconds)

    def _score(self, chunk: Chunk) -> MicroBatch:
        """The passes that the algorithm asks for, under the policy that the step began with."""
        needed = self._algorithm.scores_needed
        batch = self.cluster.place(chunk.batch)
        with self._timed("score"):
            old = self.cluster.get_actor_per_token_logps(batch) if "old" in needed else None
            reference = self.cluster.get_ref_per_token_logps(batch) if "reference" in needed else None
        return MicroBatch(batch, old, reference)
