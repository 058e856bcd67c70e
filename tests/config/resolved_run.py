"""What a configuration comes to, as values that can be compared: everything that is built of it, asked what it does.

Used by `test_effects`. An observation holds what a part answers (the next prompts, a loss's values, an optimizer's updates, the shape of a
cache), never a copy of the options; a user's mistake is an observation too. Programs aren't compiled here, so one costs 50 ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from pydantic import ValidationError

from burnish.cli.build import build_learner
from burnish.config.algorithms import AnyAlgorithmConfig
from burnish.config.errors import UserError
from burnish.config.loader import Resolved
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import Config, LoraConfig
from burnish.models.lora import init_adapter
from burnish.models.weights import save_adapter
from burnish.observe.trace_reader import read
from burnish.rl.algorithms import Algorithm, from_config
from burnish.rl.batch import Scores, build_batch
from burnish.rl.credit import TokenEstimator, credit, episode_keys, scored_episodes, uncredited
from burnish.rl.scoring import _logps
from burnish.rollout.engine import wait_for
from burnish.rollout.native.engine import NativeEngine
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.optim import make_optimizer
from burnish.train.state import leaf_names
from burnish.train.step import MicroBatch
from burnish.types import Completion, Group, Prompt, Request, SamplingParams, Status, Step, StopReason, Trajectory
from tests.rl.batches import episode, scored

PYTHON = """
import numpy as np
from burnish.agentic.agents import ModelAgent
from burnish.agentic.environments import TaskEnvironment
from burnish.rl.advantages import Advantages

def hits(completions, answer, *, factor=1.0):
    return [factor * text.count(gold) for text, gold in zip(completions, answer)]

def lengths(completions):
    return [float(len(text)) for text in completions]

def create_dataset(*, size=8, first=0):
    return [{"prompt": str(first + i), "question": str(50 + i), "answer": "1"} for i in range(size)]

def more(*, size=8, first=100):
    return create_dataset(size=size, first=first)

def says(request):
    return [7, 8]

def says_else(request):
    return [8, 7]

class Agent(ModelAgent):
    pass

class Env(TaskEnvironment):
    pass

def loss(scores, batch, *, factor=1.0):
    return -factor * scores.logps * batch.advantages, {}

def other_loss(scores, batch):
    return -scores.logps, {}

def advantage(rewards, group_ids, *, valid, factor=1.0):
    return Advantages(np.array([factor * (reward or 0.0) for reward in rewards], np.float32), valid)

def other_advantage(rewards, group_ids, *, valid):
    return Advantages(np.ones(len(rewards), np.float32), valid)

def not_finite(scores, batch):
    return scores.logps * float("nan"), {}
"""


def write_task(folder: Path) -> dict[str, Any]:
    """Models, data and functions in `folder`; returns the options of a small run on them. Files are named relative to the folder."""
    for name, seed in (("model", 0), ("other", 1)):
        write_tiny_model(folder / name, config=tiny_config(width=16), alphabet="0123456789", scale=5.0, seed=seed)
        settings = json.loads((folder / name / "tokenizer_config.json").read_text())
        settings["chat_template"] = "{% if hint %}{{ hint }}{% endif %}" + settings["chat_template"]
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, seed in (("judge", 2), ("other_judge", 3)):
        write_tiny_model(folder / name, config=tiny_config(width=16), alphabet="0123456789", classifier=True, seed=seed)
    started = init_adapter(tiny_config(width=16), LoraConfig(rank=2), jax.random.key(7))
    save_adapter(folder / "adapter", tiny_config(width=16), started)
    numbers = {"train": [*range(8), 12345678, 10**20], "more": range(20, 28), "eval": range(30, 34), "other_eval": range(40, 44)}
    for name, rows in numbers.items():
        lines = [json.dumps({"prompt": str(i), "question": str(i + 50), "answer": str(i % 10)}) for i in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "mine.py").write_text(PYTHON)
    return {
        "model": {"path": str(folder / "model"), "precision": "f32"},
        "data": {"train": [{"path": "train.jsonl"}, {"path": "more.jsonl"}], "eval": [{"path": "eval.jsonl"}], "epochs": 2},
        "rewards": [{"fn": "./mine.py:hits", "options": {"factor": 2.0}}],
        "rollout": {"max_prompt_tokens": 12, "slots": 4, "prefill_rows": 2, "decode_chunk": 4, "sampling": {"max_tokens": 4}},
        "algorithm": {"name": "grpo", "num_generations": 2},
        "training": {"max_steps": 6, "batch_size": 4, "head_chunk": 64, "optimizer": {"learning_rate": 0.01}},
        "run": {"name": "run"},
    }


def observe(options: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Everything that the command builds before it starts to sample."""
    try:
        config = Config.model_validate(options)
    except ValidationError as error:
        return {"error": str(error)}
    try:
        learner = build_learner(Resolved(config, {}, base), sinks=list, report=lambda line: None)
    except UserError as error:
        return {"error": str(error)}
    cluster, plan, codec = learner.cluster, learner._plan, learner.cluster.model.codec
    engine, optimizer = cluster.engine, config.training.optimizer
    try:
        prompts = list(itertools.islice(learner._stream, 60))
        trained = cluster._first
        passes: list[int] = []
        rows = [scored(np.ones((2, 3))) for _ in range(plan.mini_batch // 2)]

        def score(batch: Any) -> jax.Array:
            passes.append(batch.mask.shape[0])
            return jnp.zeros(batch.mask.shape)

        _logps(cluster, score, rows, rows)
        seen = {
            "model": sum(float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(cluster.model.params)),
            "start": float(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(trained))),
            "trained": {name: leaf.shape for name, leaf in zip(leaf_names(trained), jax.tree.leaves(trained), strict=True)},
            "scale": cluster._scale,
            "precision": cluster.precision,
            "meshes": {role: mesh_of(site.mesh) for role, site in cluster._sites.items()},
            "context": cluster.context,
            "engine": sampler(engine),
            "reward model": None
            if (judge := cluster.reward_model) is None
            else [float(jnp.sum(jnp.abs(judge.params["score"]))), judge.max_tokens, judge._rows],
            "teacher": None if (teacher := cluster._teacher) is None else float(jnp.sum(jnp.abs(teacher.params["embed"]))),
            "prompts": [(prompt.id, prompt.messages, prompt.meta) for prompt in prompts],
            "ids": codec.template.encode(list(prompts[0].messages)),
            "held out": [(prompt.id, prompt.messages) for prompt in learner._held_out],
            "rewards": [(spec.name, spec.weight, spec.timeout_s, said(spec.fn)) for spec in learner._rewards.specs],
            "agent": [type(learner._make_agent()).__name__, vars(learner._make_agent())],
            "environment": [type(env := learner._make_env(prompts[0])).__name__, vars(env)],
            "episodes": [vars(learner._orchestrator._context.limits), learner._orchestrator._max_concurrency],
            "sampling": learner._params(config.rollout.sampling),
            "evaluation": learner._evaluation_samplings(),
            "noise": learner._run.seed,
            "batches": [plan.batch, plan.mini_batch, plan.train_micro, plan.tokens_per_device, plan.rollout, plan.queue_size, passes],
            "updates": [learner._total_updates, learner._critic_updates],
            "optimizer": updates(optimizer, learner._total_updates),
            "algorithm": decided(learner._algorithm),
        }
        if (critic := cluster._critic) is not None:
            seen["critic"] = [critic._folder, updates(critic.config.optimizer, learner._critic_updates)]
        return plain(seen)
    finally:
        learner.close()


def sampler(engine: Any) -> Any:
    """How the native engine is laid out; what another one says."""
    if isinstance(engine, NativeEngine):
        memory, runner = engine._runner.memory, engine._runner
        shapes = jax.tree.map(jnp.shape, memory.cache)
        return [shapes, memory._budget, engine._scheduler.rows, runner._limits, engine._in_flight, engine.lent]
    return wait_for(engine.generate(Request((5,), SamplingParams(4)))).ids.tolist()


def mesh_of(mesh: Mesh | None) -> Any:
    return None if mesh is None else [dict(mesh.shape), [device.id for device in mesh.devices.flat]]


def observe_algorithm(config: AnyAlgorithmConfig, base: Path) -> dict[str, Any]:
    """What the record does that a configuration becomes."""
    try:
        return plain(decided(from_config(config, max_tokens=9, base=base)))
    except UserError as error:
        return {"error": str(error)}


def program(options: Mapping[str, Any], base: Path) -> str:
    """The forward-backward pass of the policy as jax traces it."""
    learner = build_learner(Resolved(Config.model_validate(options), {}, base), sinks=list, report=lambda line: None)
    with learner:
        cluster = learner.cluster
        cluster.prepare(learner._algorithm, total_updates=1)
        assert cluster._steps is not None
        batch = cluster.place(build_batch(GROUPS, uncredited(GROUPS, train_truncated=True), temperature=1.0))
        traced = jax.make_jaxpr(cluster._steps.totals)(cluster.state.trainable, cluster._base, MicroBatch(batch))
        return re.sub(r"0x[0-9a-f]+", "", str(traced))


def slope(config: AnyAlgorithmConfig, base: Path) -> list[float]:
    """The gradient of the mean loss: what is left to tell two losses of equal value apart. A second, where `decided` takes a tenth."""
    algorithm = from_config(config, max_tokens=9, base=base)

    def mean(logps: jax.Array) -> jax.Array:
        return algorithm.aggregate(algorithm.loss(dataclasses.replace(SCORES, logps=logps), BATCH)[0], BATCH).value()

    return plain(jax.grad(mean)(SCORES.logps))


def said(fn: Any) -> Any:
    """What a reward function answers; nothing of those that need a model."""
    try:
        return fn(completions=["11", "121"], answer=["1", "2"])
    except TypeError:
        return [] if "get_rewards" in repr(fn) else fn(completions=["11", "121"])


def updates(config: OptimizerConfig, total: int) -> Any:
    """Three updates of a small model and the rates of some more, as text of 6 digits."""
    optimizer = make_optimizer(config, total_updates=total)
    params = {"layers": {"w": jnp.arange(24.0).reshape(2, 3, 4) / 7, "norm": jnp.ones((2, 4))}, "embed": jnp.arange(6.0).reshape(2, 3)}
    state, steps = optimizer.transform.init(params), []
    for number in range(1, 4):
        change, state = optimizer.transform.update(jax.tree.map(lambda p, n=number: 0.3 * n - jnp.sin(n * p), params), state, params)
        steps.append(change)
    return [steps, [optimizer.schedule(count) for count in range(0, 12)], optimizer.max_grad_norm]


def plain(value: Any) -> Any:
    """Arrays as lists of numbers of 6 digits, so that `==` compares."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, jax.Array | np.ndarray):
        return [float(f"{x:.6g}") for x in np.ravel(np.asarray(value, np.float64))]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [plain(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------------------------- what a record does

NOW = np.array([[-0.2, -2.0, -1.0, -0.4], [-0.3, -1.6, -0.5, -1.5], [-2.4, -0.7, -0.8, -0.1], [-1.2, -2.0, -0.9, -1.4]], np.float32)
MOVED = np.array([[1.3, -0.9, 0.5, 0.1], [0.2, -1.3, 0.02, -0.04], [-0.8, -0.5, 0.9, 0.0], [0.4, 0.9, 0.6, 0.0]], np.float32)
BESIDE = np.array([[1.0, 0.9, 0.8, 0.9], [-1.2, -0.9, -0.8, -1.2], [0.1, -0.1, 0.9, 0.2], [-0.4, 1.1, 0.3, 0.0]], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], bool)
SCORES = Scores(logps=jnp.asarray(NOW), old_logps=jnp.asarray(NOW - MOVED), ref_logps=jnp.asarray(NOW + 0.3), entropy=jnp.asarray(-NOW))
BATCH = scored(
    MASK,
    [[1.5, -0.5, 1.0, -1.0], [-1.0, 1.0, 0.5, -2.0], [-1.0, -1.0, 2.0, 0], [-1.0, -1.0, 0, 0]],
    prompts=[[0], [0], [1], [1]],
    sampler_logps=NOW - MOVED - BESIDE,
)


def decided(algorithm: Algorithm) -> dict[str, Any]:
    """Advantages of given episodes; loss, mean and rejections of given scores; what it asks for. Its name is no deed."""
    batch, rejected = (BATCH, None) if algorithm.reject is None else algorithm.reject(SCORES, BATCH)

    per_token, metrics = algorithm.loss(SCORES, batch)
    seen = {
        "loss": [jnp.where(batch.mask, per_token, 0.0), algorithm.aggregate(per_token, batch).value()],
        "metrics": {name: metric.value() for name, metric in (metrics | (rejected or {})).items()},
        "advantages": advantages(algorithm),
        "penalty": None
        if algorithm.reward_kl is None
        else algorithm.reward_kl.beta * algorithm.reward_kl.estimator(SCORES.logps, SCORES.ref_logps),
        "value loss": None if algorithm.value_loss is None else algorithm.value_loss(jnp.asarray(NOW), jnp.asarray(NOW - MOVED), BATCH)[0],
        "passes": [sorted(algorithm.scores_needed), algorithm.old, algorithm.advantage_scope],
        "repeats": [algorithm.num_generations, algorithm.num_iterations, algorithm.warmup_steps, algorithm.entropy_gradient],
        "groups without signal": [algorithm.zero_signal, algorithm.max_resample_rounds, algorithm.on_shortage],
    }
    return seen


def advantages(algorithm: Algorithm) -> Any:
    """As the producer or, where scores are needed, the trainer computes them."""
    if isinstance(algorithm.advantage, TokenEstimator):
        counted = uncredited(GROUPS, train_truncated=algorithm.train_truncated)
        present = [i for i, key in enumerate(episode_keys(GROUPS)) if key in counted]
        tokens = {i: np.sin(np.arange(6, dtype=np.float32) + i) for i in present}
        kl = None if algorithm.reward_kl is None else {i: algorithm.reward_kl.beta * np.abs(values) for i, values in tokens.items()}
        gain = {i: np.cos(values) for i, values in tokens.items()} if "teacher" in algorithm.scores_needed else None
        episodes = scored_episodes(GROUPS, present, values=tokens, last_values=dict.fromkeys(present, 0.5), kl=kl, teacher_gain=gain)
        return [[answer.advantages, answer.returns] for answer in algorithm.advantage(episodes)]
    parts = [[group] for group in GROUPS] if algorithm.advantage_scope == "group" else [GROUPS]
    options = {"train_truncated": algorithm.train_truncated, "per": algorithm.credit, "gamma": algorithm.gamma}
    return {key: np.asarray(worth) for part in parts for key, worth in credit(part, algorithm.advantage, **options).items()}


def two_turns(draw: int, sample: int, first: float, last: float, *, status: Status = Status.OK) -> Trajectory:
    """Three ids a turn; the environment pays for the first, two reward functions for the whole."""
    played = episode([5, 6], [7] * 6, draw=draw, sample=sample, status=status)
    completion = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), StopReason.STOP_ID)
    played.steps = [Step(np.zeros(2, np.int32), completion, "", reward=reward) for reward in (first, None)]
    played.rewards, played.reward_weights = {"environment": first, "judge": last, "length": 0.1 * sample}, {"judge": 0.5}
    played.reward = first + 0.5 * last + 0.1 * sample
    return played


GROUPS = [
    Group(
        (0, 0), Prompt("a", ()), [two_turns(0, 0, 0.0, 1.0), two_turns(0, 1, 1.0, 0.2), two_turns(0, 2, 0.3, 1.0, status=Status.TRUNCATED)]
    ),
    Group((0, 1), Prompt("b", ()), [two_turns(1, 0, 2.0, 1.0), two_turns(1, 1, 0.5, 3.0)]),
]


# ------------------------------------------------------------------------------------------------------------------- a real run

BY_CHANCE = ("engine.", "prefill", "decode")
"""Spans whose number depends on which requests meet in the engine."""


def left_behind(root: Path, *, exit_code: int, said: str) -> dict[str, Any]:
    """What a finished command leaves in its working directory: files, spans, evaluations; and lines on the screen, without numbers."""
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    found: dict[str, Any] = {"exit code": exit_code, "files": [str(path) for path in files if path.parent.name != "tensorboard"]}
    found["tensorboard"] = len([path for path in files if path.parent.name == "tensorboard"])
    found["saved"] = sorted(str(path.relative_to(root)) for path in root.rglob("checkpoints/*"))
    found["screen"] = [re.sub(r"[0-9.]+", "#", line.partition("·")[0].replace(str(root), "")) for line in said.splitlines()]
    for path in (root / file for file in files):
        if path.name == "trace.pftrace":
            spans = [one.name for one in read(path).slices if one.group == "episodes" or not one.name.startswith(BY_CHANCE)]
            found["spans"] = {name: spans.count(name) for name in {*spans}}
        if path.parent.name == "transcripts":
            found.setdefault("transcripts", []).append(sorted(json.loads(path.read_text().splitlines()[0])))
        if path.name == "eval.json":
            found["evaluations"] = [(entry["label"], entry["step"]) for entry in json.loads(path.read_text())["evaluations"]]
    return found
