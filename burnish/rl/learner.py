"""The outer loop of reinforcement learning: a producer of batches, a trainer that drains them, an engine that gets the new weights.

Owns the loop, evaluation on its way, and the end in every case. The algorithm is a record of values (`rl.algorithms`), placement the
cluster's, episodes the orchestrator's, scores and the advantages that need them `rl.scoring`'s. A *step* ends when the engine has a new
version; an *update* is one optimizer call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.agentic.agents import ConversationAgentBase, ModelAgent
from burnish.agentic.calls import Calls, leaked_threads
from burnish.agentic.environments import SINGLE_PROMPT, BaseTaskEnv, TaskEnvironment
from burnish.agentic.orchestrator import RolloutOrchestrator
from burnish.agentic.processes import Zygote
from burnish.agentic.ray_workers import ray_workers
from burnish.agentic.slots import Adaptive
from burnish.agentic.trajectory import EpisodeContext
from burnish.agentic.workers import WorkerPool
from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.config.algorithms import CriticConfig
from burnish.config.errors import UserError
from burnish.config.schema import EpisodeLimits, RayConfig, RolloutConfig, RunSection, SamplingConfig, TrainingConfig
from burnish.data.stream import PromptStream
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.observe import trace
from burnish.observe.devices import peak_mib
from burnish.observe.metrics import Metric, MetricCollector
from burnish.observe.sinks import AFTER, BEFORE, EvalReport, Sink, Sinks, StepReport, TokenScores
from burnish.observe.trace import span
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.cluster import RLCluster
from burnish.rl.critic import OPTIMIZER
from burnish.rl.evaluation import Evaluation, Evaluator, evaluation_samplings, metric_names
from burnish.rl.fleet import all_say, leaders, together
from burnish.rl.handoff import Handoff, Interrupted, VersionGate
from burnish.rl.overlap import streams
from burnish.rl.producer import Chunk, Producer
from burnish.rl.progress import TrainResult, pack, unpack
from burnish.rl.prompts import held_out_prompts, require_held_out, token_counter, training_stream
from burnish.rl.replay import Replayed
from burnish.rl.reports import record_rollout
from burnish.rl.scoring import Scored, record_chunks, record_credit, score, token_scores
from burnish.rl.speed import utilisation
from burnish.text.codec import Codec
from burnish.train.compiles import programs_compiled
from burnish.train.optim import make_optimizer
from burnish.types import Group, Prompt, SamplingParams

log = logging.getLogger(__name__)

_LEAVE_S = 30.0
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class RLLearner:
    """Trains a policy with any algorithm record.

    policy: an `RLCluster`, or a `Model` or a path, for which a cluster on the devices at hand is built (every weight is trained; for an
    adapter build the cluster with `lora=`). reward_fns: `fn(prompts, completions, **columns) -> list[float | None]`. train_ds: rows
    (mappings with a "prompt", or strings) or a `PromptStream`; eval_ds: rows or prompts, read to their end at each evaluation.
    agent_class, env_class: called with their kwargs for each episode; the environment gets the task first. limits: of episodes.
    training, rollout, critic: options, where `policy` is no cluster, which has its own. run: name and seed. sinks: who hears of steps and
    evaluations. Plain environments, tools and reward functions of a module run in worker processes (`agentic.workers`), of a Ray cluster
    where `ray` is given.

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
        limits: EpisodeLimits = EpisodeLimits(),
        ray: RayConfig | None = None,
        training: TrainingConfig | None = None,
        rollout: RolloutConfig | None = None,
        critic: CriticConfig | None = None,
        run: RunSection | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if isinstance(policy, RLCluster) and (training is not None or rollout is not None):
            raise UserError("`training` and `rollout` belong to the cluster here: pass them to RLCluster(...)")
        self._training = policy.training_config if isinstance(policy, RLCluster) else training or TrainingConfig()
        self._rollout = policy.rollout_config if isinstance(policy, RLCluster) else rollout or RolloutConfig()
        self._run = run or RunSection()
        self._plan = BatchPlan.from_config(self._training, algorithm, self._rollout)
        self._total_updates, self._critic_updates = planned_updates(algorithm, self._training, self._plan, critic)
        self._algorithm = anchored(algorithm, self._plan)
        if not reward_fns and "teacher" in algorithm.scores_needed:
            reward_fns = [RewardSpec("ungraded", _ungraded)]
        slots = self._rollout.slots
        max_concurrency = limits.max_concurrency or 4 * slots
        if max_concurrency == "adaptive":
            max_concurrency = Adaptive(slots, 16 * slots)
        most, deaths = max_concurrency.most if isinstance(max_concurrency, Adaptive) else max_concurrency, limits.max_worker_deaths
        # Two pools: an episode keeps its worker to its end, and rewards mustn't wait for that.
        self._zygote = Zygote()
        elsewhere, sizes = None, (most, os.cpu_count() or 1)
        if ray is not None:
            elsewhere, sizes = ray_workers(ray), (min(most, ray.workers), ray.workers)
        self._pools = tuple(WorkerPool(size, zygote=self._zygote, elsewhere=elsewhere, max_deaths=deaths) for size in sizes)
        calls, graders = map(Calls, self._pools)
        specs = [fn if isinstance(fn, RewardSpec) else RewardSpec.of(fn) for fn in reward_fns]
        self._rewards = RewardManager(specs, runner=graders)
        calls.check_environment(env_class)
        self._make_agent = lambda: agent_class(**agent_kwargs)
        self._make_env = lambda prompt: env_class({**prompt.meta, "prompt": list(prompt.messages)}, **env_kwargs)
        count = token_counter(_codec(policy).template, self._make_agent) if env_class in SINGLE_PROMPT else None
        limit, overlong = self._rollout.max_prompt_tokens, self._rollout.overlong_prompts
        self._stream = training_stream(
            train_ds, count_tokens=count, max_tokens=limit, policy=overlong, seed=self._run.seed, batch_size=self._plan.batch
        )
        self._held_out = [] if eval_ds is None else held_out_prompts(eval_ds, count_tokens=count, max_tokens=limit, policy=overlong)
        if not self._rewards.specs and env_class in SINGLE_PROMPT:
            raise UserError(f"reward_fns is empty and a {env_class.__name__} gives no reward: give at least one reward function")
        for prompt in (*self._stream.samples(), *self._held_out):
            self._rewards.check(prompt)
        require_held_out(self._training, self._held_out)
        self.cluster = (
            policy
            if isinstance(policy, RLCluster)
            else RLCluster(policy, training=self._training, rollout=self._rollout, critic=critic, seed=self._run.seed)
        )
        self._fleet = self.cluster.fleet
        self._streams = streams(self._algorithm, self._plan, apart=self.cluster.samples_apart, num_processes=self._fleet.count)
        self._sinks = Sinks(sinks if self._fleet.leads else ())
        self._metrics = MetricCollector()
        codec = self.cluster.model.codec
        context = EpisodeContext(
            engine=self.cluster.engine,
            template=codec.template,
            decode=codec.tokenizer.decode,
            context=self.cluster.context,
            max_prompt_tokens=limit,
            overlong_prompts=overlong,
            bos_id=codec.tokenizer.bos_id,
            limits=limits,
            calls=calls,
        )
        self._orchestrator = RolloutOrchestrator(
            context,
            self._rewards,
            make_agent=self._make_agent,
            make_env=self._make_env,
            max_concurrency=max_concurrency,
        )
        self._replayed = None if self._rollout.replay is None else Replayed(self._rollout.replay)
        self._programs = programs_compiled()
        self._closed = False
        self._result = TrainResult()
        self._cursor: Mapping[str, Any] = self._stream.cursor()
        self._prepared = False
        self._half_done = False  # some updates of a step are applied, not all
        self._inner_seconds = 0.0  # of phases inside the one that is timed
        self._handoff: Handoff[Chunk] = Handoff(self._plan.queue_size)
        self._evaluator = Evaluator(self._orchestrator, self._fleet)
        self._fleet.on_stop(self.stop)

    # ---------------------------------------------------------------------------------------------------------------- the loop

    def train(self, *, on_step: Callable[[int], None] | None = None, saver: Saver | None = None) -> TrainResult:
        """Run to `training.max_steps`, to the end of the data, or until `stop`. saver: commits what it is due, and the last step.

        `on_step(step)` is called after each step, before the next begins. When this returns, the last step is committed.
        Raises what the producer, a reward in the first batch, the engine, an update or the last commit raised; the cluster is closed then
        too.
        """
        self._refuse_closed()
        if self._rollout.sampling.temperature == 0:
            raise UserError("rollout.sampling.temperature is 0: all samples of a group would be the same, and nothing could be learned")
        if saver is not None:
            if saver.fleet is not self._fleet:
                raise UserError("the saver is of other processes than the cluster: Saver(folder, …, fleet=cluster.fleet)")
            evaluates = self._training.compare or self._training.eval_every is not None
            saver.check_metrics({name for way in self._evaluation_samplings() for name in metric_names(way)} if evaluates else ())
        result, start = self._result, self._result.steps
        gate = VersionGate(self._plan.max_staleness, version=start)
        producer = Producer(
            stream=self._stream,
            orchestrator=self._orchestrator if self._replayed is None else self._replayed,
            algorithm=self._algorithm,
            plan=self._plan,
            params=self._params(self._rollout.sampling),
            handoff=self._handoff,
            gate=gate,
            seed=self._run.seed,
            steps=range(start, self._training.max_steps),
            rows_multiple=self.cluster.rows_multiple,
            pairs_per_token=self.cluster.model.config.pairs_per_token,
            streams=self._streams,
            fleet=self._fleet,
        )
        try:
            self._prepare()
            try:
                with span("run", steps=self._training.max_steps, after=start, streams=self._streams):
                    self._loop(producer, gate, saver, on_step)
            except Interrupted:
                result.stopped = True
            if saver is not None:
                if result.steps > saver.newest_step and not self._half_done:
                    self._save(saver)
                saver.finish()
            return result
        finally:
            producer.stop()
            self.close()
            if producer.ident is not None:
                producer.join(_LEAVE_S)
                if producer.is_alive():
                    log.warning("the producer's thread is still busy %.0f s after its end; it is left behind", _LEAVE_S)

    def _loop(self, producer: Producer, gate: VersionGate, saver: Saver | None, on_step: Callable[[int], None] | None) -> None:
        """Evaluate, make every step that is left, evaluate. Raises `Interrupted` where the run was asked to stop."""
        training, result = self._training, self._result
        if training.compare and result.steps == 0:
            self._evaluate(BEFORE, 0)
        producer.start()
        while True:
            with span("step", step=result.steps):
                went_on = self._step()
            if not went_on:
                break
            step = result.steps
            if training.eval_every is not None and step % training.eval_every == 0:
                self._evaluate(f"step {step}", step)
            if saver is not None and saver.is_due(step):
                self._save(saver)
            if on_step is not None:
                on_step(step)
            gate.publish(self.cluster.version)
        if saver is not None and result.steps > saver.newest_step:
            self._save(saver)  # before an evaluation that may take minutes
        if training.compare:
            self._evaluate(AFTER, result.steps)

    def stop(self) -> None:
        """Ask the run to end soon, with its last whole step saved. Any thread, and a signal's handler, may call it, also before `train`.

        A step of which no update is applied is given up: its prompts are drawn again when the run goes on. One of which all are applied
        is finished. With only some of its updates applied, it is given up too, and nothing newer than the last commit can be saved.
        """
        self._handoff.interrupt()
        self._evaluator.cancel()
        self._fleet.ask_to_stop()

    def _prepare(self) -> None:
        if not self._prepared:
            self.cluster.prepare(self._algorithm, total_updates=self._total_updates, critic_updates=self._critic_updates)
            self._frozen = self.cluster.frozen_digest()
            self._prepared = True

    def _step(self) -> bool:
        """All updates of one step, then the engine's new weights and the step's report. False where the data has ended instead."""
        start, step, groups = time.monotonic(), self._result.steps + 1, []
        cursor: Mapping[str, Any] = {}
        scores: dict[Any, TokenScores] = {}
        for _ in range(self._plan.num_mini_batches):
            scored: list[Scored] = []
            for iteration in range(self._algorithm.num_iterations):
                arriving = self._arriving()
                first = next(arriving, None)
                if first is None:
                    return False
                cursor = first.cursor
                chunks = itertools.chain([first], arriving)
                if iteration == 0:
                    parts = self._scored(chunks, scored, groups, scores)
                else:
                    parts = (part for part, _ in zip(scored, chunks, strict=True))
                self._update(parts, first, step)
        record_rollout(self._metrics, groups, version=self.cluster.version, train_truncated=self._algorithm.train_truncated)
        with self._timed("sync"):
            self.cluster.sync_weights()
        self._result.steps, self._cursor, self._half_done = step, cursor, False
        self._report(step, groups, scores, time.monotonic() - start)
        return True

    def _arriving(self) -> Iterator[Chunk]:
        """The micro-batches of one update, each when it is there if they stream, else all when the last is; none at the end of the data,
        which is always the end of a step. All processes have the same."""
        taken = self._take(1 if self._streams else None)
        yield from taken
        for _ in range(taken[0].count - len(taken) if taken else 0):
            yield from self._take(1)

    def _take(self, most: int | None) -> list[Chunk]:
        """The next micro-batches from the producer: those of an update, or `most` of them."""

        def take() -> list[Chunk]:
            first = self._handoff.get()
            if first is None:
                return []
            chunks = [first, *(self._handoff.get() for _ in range((most or first.count) - 1))]
            return [chunk for chunk in chunks if chunk is not None]

        self._metrics.mean("queue/waiting", self._handoff.waiting)
        with self._timed("wait"):
            return together(self._fleet, "batches for an update", take, lambda chunks: [chunk.sign() for chunk in chunks])

    def _scored(
        self, chunks: Iterator[Chunk], scored: list[Scored], groups: list[Group], scores: dict[Any, TokenScores]
    ) -> Iterator[Scored]:
        """The micro-batches of an update, scored; one after another if they stream. Lists and scores get what there was."""
        for portion in ([chunk] for chunk in chunks) if self._streams else [list(chunks)]:
            with self._timed("score"):
                found = score(self.cluster, self._algorithm, portion)
            scored += found
            groups += [group for chunk in portion for group in chunk.sampled]
            record_chunks(self._metrics, portion)
            record_credit(self._metrics, found)
            # An anchor that is the sampler itself says nothing of it; of several processes each has a part only.
            scores |= token_scores(found, portion, with_policy=self._algorithm.old != "sampler" and self._fleet.count == 1)
            yield from found

    def _update(self, parts: Iterator[Scored], first: Chunk, step: int) -> None:
        """One update of the critic, if there is one, and one of the policy, unless the critic still warms up.

        parts: its micro-batches, each taken when it is needed; those of a critic's update are taken before.
        """

        def last_seen() -> Iterator[Scored]:
            for number, part in enumerate(parts, start=1):
                self._half_done = self._half_done or number == first.count  # before that nothing is changed
                yield part

        seen: Iterable[Scored] = last_seen() if self._streams else list(last_seen())
        with self._timed("update", ends=[trace.flow(*first.key[:2])], version=self.cluster.version):
            if self._algorithm.value_loss is not None:
                values = (part.critic for part in seen if part.critic is not None)
                self._metrics.merge(self.cluster.update_critic(values, count=first.count, step=step))
            if step > self._algorithm.warmup_steps:
                self._metrics.merge(self.cluster.update_actor((part.actor for part in seen), count=first.count, step=step))

    def _report(self, step: int, groups: Sequence[Group], scores: Mapping[Any, TokenScores], seconds: float) -> None:
        sampled = sum(t.num_sampled for group in groups for t in group.trajectories)
        self._metrics.last("perf/step_seconds", seconds)
        self._metrics.max("memory/host_peak_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / 2**20)
        if (device_mib := peak_mib()) is not None:
            self._metrics.max("memory/device_peak_mib", device_mib)
        self._metrics.last("workers/killed", sum(pool.killed for pool in self._pools))
        self._metrics.last("workers/died", sum(pool.died for pool in self._pools))
        self._metrics.last("workers/leaked_threads", leaked_threads())
        if self.cluster.reward_model is not None:
            for counted in all_say(self._fleet, "learner", {k: asdict(m) for k, m in self.cluster.reward_model.take_metrics().items()}):
                self._metrics.merge({name: Metric(**metric) for name, metric in counted.items()})
        metrics = self._metrics.take()
        metrics["perf/compiles"], self._programs = float(programs_compiled() - self._programs), programs_compiled()
        metrics["perf/rollout_tokens_per_second"] = sampled / max(metrics["time/rollout_seconds"], 1e-9)
        metrics["perf/train_tokens_per_second"] = sampled * self._algorithm.num_iterations / max(metrics["time/update_seconds"], 1e-9)
        metrics |= utilisation(self.cluster, groups, metrics["time/update_seconds"], iterations=self._algorithm.num_iterations)
        self._result.history.append(metrics)
        decode = functools.partial(self.cluster.model.codec.tokenizer.decode, skip_special=False)
        self._sinks.step(StepReport(step, self._training.max_steps, metrics, groups, scores, decode))

    @contextlib.contextmanager
    def _timed(self, phase: str, **about: Any) -> Iterator[None]:
        """Add to the phase's seconds, without those of phases inside it. What goes wrong in it is noted to have done so here."""
        outer, self._inner_seconds = self._inner_seconds, 0.0
        with span(phase, step=self._result.steps, **about) as timed:
            try:
                yield
            except Exception as error:
                error.add_note(f"in {phase}, after step {self._result.steps}")
                raise
        self._metrics.sum(f"time/{phase}_seconds", timed.seconds - self._inner_seconds)
        self._inner_seconds = outer + timed.seconds

    # ----------------------------------------------------------------------------------------------------- save, and go on later

    def resume(self, checkpoints: Path, step: int | None = None) -> int:
        """Go on from a checkpoint as if the run had never stopped; call it before `train`. Returns the step, 0 where there is none yet.

        step: which; None takes the newest that is intact, and warns of newer ones that aren't. Later ones lose their names: the run makes
        them again. Raises CheckpointError, with every difference, for the checkpoint of another run; nothing is changed then.
        """
        self._refuse_closed()
        found = leaders(self._fleet, "learner", store.newest_intact(checkpoints) if step is None and self._fleet.leads else step)
        if found is None:
            return 0
        self._prepare()
        extra: dict[str, Any] = {}

        def read(like: Any) -> Any:
            nonlocal extra
            states, extra = store.read(checkpoints, found, like, facts=self._facts())
            return states

        self.cluster.restore(read, version=found)
        self._result, self._cursor = unpack(found, extra)
        self._stream.restore(self._cursor)
        if self._fleet.leads:
            store.set_aside_after(checkpoints, found)
        return found

    def _save(self, saver: Saver) -> None:
        """Hand the state after the last whole step to the saver; no update of the next may have been applied."""
        with self._timed("save"):
            saver.save(self._result.steps, self.cluster.states, pack(self._result, cursor=self._cursor, facts=self._facts()))
        self._metrics.merge(saver.take_metrics())

    def _facts(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that stopped, beyond the shapes of its arrays."""
        return {
            "run.seed": self._run.seed,
            "training.batch_size": self._plan.batch,
            "training.mini_batch_size": self._plan.mini_batch,
            "algorithm.num_generations": self._algorithm.num_generations,
            "algorithm.num_iterations": self._algorithm.num_iterations,
            "precision": self.cluster.precision,
            "adapter's scale": self.cluster.adapter_scale,
            "digest of the frozen weights": self._frozen,
        }

    # -------------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self) -> dict[str, Evaluation]:
        """Sample the held-out prompts, all of them, as `rollout.evaluation` says; by label. Trains on nothing, changes nothing."""
        self._refuse_closed()
        if not self._held_out:
            raise UserError("there are no held-out prompts to evaluate: give eval_ds (data.eval)")
        return self._evaluator.run(self._held_out, self._evaluation_samplings(), seed=self._run.seed)

    def sample(self, count: int, *, temperature: float | None = None) -> list[Evaluation]:
        """`count` samples of every held-out prompt, as training samples them; each with noise of its own. temperature: another one."""
        self._refuse_closed()
        if not self._held_out:
            raise UserError("there are no held-out prompts to sample: give eval_ds (data.eval)")
        sampling = self._rollout.sampling if temperature is None else self._rollout.sampling.model_copy(update={"temperature": temperature})
        params = self._params(sampling)
        return list(self._evaluator.run(self._held_out, {str(n): params for n in range(count)}, seed=self._run.seed).values())

    @property
    def held_out_clusters(self) -> list[Hashable]:
        """Which held-out prompts belong together: those whose rows have the same "question"; without that column each stands alone."""
        return [prompt.meta.get("question", prompt.id) for prompt in self._held_out]

    def _evaluation_samplings(self) -> dict[str, SamplingParams]:
        return {
            way: self._params(sampling) for way, sampling in evaluation_samplings(self._rollout, compare=self._training.compare).items()
        }

    def _evaluate(self, label: str, step: int) -> None:
        with self._timed("evaluate"):
            found = together(self._fleet, "evaluations", self.evaluate, sorted)
        self._result.evaluations[step] = found
        metrics = {name: value for evaluation in found.values() for name, value in evaluation.metrics().items()}
        trajectories = [t for evaluation in found.values() for t in evaluation.trajectories]
        self._sinks.evaluation(EvalReport(step, label, metrics, trajectories))

    def _params(self, sampling: SamplingConfig) -> SamplingParams:
        return SamplingParams(**sampling.model_dump(), stop_ids=self.cluster.model.codec.template.stop_ids)

    # ------------------------------------------------------------------------------------------------------------------ the end

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this learner is closed (train() closes it at its end); make a new one")

    def close(self) -> None:
        """Stop the engine and the sinks. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            for pool in self._pools:
                pool.close()
            self._zygote.close()
            self.cluster.close()
            self._sinks.close()

    def __enter__(self) -> RLLearner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _ungraded(completions: Sequence[str]) -> list[float]:
    """Where a teacher says what is good: every episode counts, none more than another."""
    return [0.0] * len(completions)


def anchored(algorithm: Algorithm, plan: BatchPlan) -> Algorithm:
    """The algorithm with all the scores that it needs in steps of this plan.

    Once a step has several updates, or older weights have sampled for it, the policy now isn't the one that ratios are taken to.
    """
    moves = plan.updates_per_step > 1 or plan.max_staleness > 0
    return dataclasses.replace(algorithm, scores_needed=algorithm.scores_needed | ({"old"} if algorithm.old == "auto" and moves else set()))


def planned_updates(algorithm: Algorithm, training: TrainingConfig, plan: BatchPlan, critic: CriticConfig | None) -> tuple[int, int]:
    """How many updates the policy and the critic get in a whole run. Raises `UserError` where a warm-up or a schedule has no room."""
    if algorithm.warmup_steps >= training.max_steps:
        raise UserError(
            f"the critic warms up for {algorithm.warmup_steps} steps and training.max_steps is {training.max_steps}: the policy would "
            "never learn; shorten the warm-up, or train longer"
        )
    critics = training.max_steps * plan.updates_per_step
    policys = critics - algorithm.warmup_steps * plan.updates_per_step
    make_optimizer(training.optimizer, total_updates=policys)  # for its check of the schedule
    if critic is not None:
        make_optimizer(critic.optimizer, total_updates=critics, key=OPTIMIZER)
    return policys, critics


def _codec(policy: RLCluster | Model | str | Path) -> Codec:
    if isinstance(policy, RLCluster):
        return policy.model.codec
    return policy.codec if isinstance(policy, Model) else Codec.load(locate(str(policy)))


__all__ = ["RLLearner", "anchored", "planned_updates"]
