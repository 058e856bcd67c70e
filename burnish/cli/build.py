"""From a configuration to a learner, one named step at a time: text, data, rewards, model, cluster, learner.

Owns the order (what is cheap and often wrong comes first, so a mistake costs seconds and no weights) and the names in which steps are
reported. `train` and `eval` call it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from burnish import rewards
from burnish.agentic import agents, environments, toolbox, worlds
from burnish.agentic.mcp import McpServer
from burnish.cli.options import AnyConfig
from burnish.config.algorithms import OnPolicyDistillationConfig, PPOConfig
from burnish.config.errors import BurnishError, UserError
from burnish.config.loader import Resolved
from burnish.config.resolve import check_options, resolve
from burnish.config.schema import Config, DataSection, LoraConfig, ModelSection, RewardConfig, SourceConfig
from burnish.data.source import RowReader, Source, from_file, from_recipe
from burnish.data.stream import PromptStream
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.models.sharding import check_mesh
from burnish.models.weights import load_config
from burnish.observe.sinks import Sink
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl import algorithms
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.cluster import RLCluster, longest_sequence
from burnish.rl.critic import check_critic
from burnish.rl.engines import engine_maker
from burnish.rl.fleet import ALONE, Fleet
from burnish.rl.learner import RLLearner, planned_updates
from burnish.rl.placement import actor_place
from burnish.rl.prompts import held_out_prompts, require_held_out, token_counter, training_stream
from burnish.rl.reference import check_teacher
from burnish.rl.reward_model import check_reward_model
from burnish.rl.sites import make_mesh
from burnish.text.codec import Codec

Report = Callable[[str], None]

REWARD_MODEL = "reward_model"
"""The name of the reward model's scores among the rewards."""


def build_learner(
    resolved: Resolved[Config],
    *,
    sinks: Callable[[], Sequence[Sink]],
    report: Report,
    load_model: Callable[..., Model] = Model.load,
    fleet: Fleet = ALONE,
) -> RLLearner:
    """Build everything that `resolved` describes. `sinks` is called once all that can be wrong before loading weights was checked.

    load_model: called as `Model.load` is. fleet: the processes of the run. Raises what a step raises, a user's mistake with the step's name
    in front.
    """
    config, base = resolved.config, resolved.base
    with building("text", report) as say:
        folder = locate(required(config.model.path, "model.path", "a Hugging Face folder or a name from `burnish fetch`"))
        architecture = load_config(folder)
        codec = Codec.load(folder, template_kwargs=config.data.chat_template_kwargs)
        say(f"{folder}")
    with building("data", report) as say:
        agent_class = resolve(config.agent.agent, kind="agent", module=agents, base=base)
        options = agent_options(config, base)
        check_options(agent_class, options, what=f"agent `{config.agent.agent}`")
        env_class = resolve(config.environment.env, kind="environment", module=worlds, base=base)
        world = environment_options(config, base)
        check_options(env_class, world, what=f"environment `{config.environment.env}`", reserved=("task",))
        make_agent = functools.partial(agent_class, **options)
        make_agent()  # for its check of its options
        count = token_counter(codec.template, make_agent) if env_class in environments.SINGLE_PROMPT else None
        limit = {"count_tokens": count, "max_tokens": config.rollout.max_prompt_tokens, "policy": config.rollout.overlong_prompts}
        sources = make_sources(config.data, config.data.train, base)
        stream = training_stream(
            sources,
            **limit,
            seed=config.run.seed,
            batch_size=config.training.batch_size,
            weights=[source.weight for source in config.data.train],
            shuffle=config.data.shuffle,
            epochs=config.data.epochs,
        )
        held_out = held_out_prompts(make_sources(config.data, config.data.eval, base), **limit) if config.data.eval else None
        require_held_out(config.training, held_out)
        say(f"{_count(stream)} prompts to train on, {len(held_out or ())} held out")
    with building("rewards", report) as say:
        specs = [reward_spec(reward, base) for reward in config.rewards]
        taught = isinstance(config.algorithm, OnPolicyDistillationConfig)
        if config.reward_model is not None:
            check_reward_model(config.reward_model)
        elif not specs and env_class in environments.SINGLE_PROMPT and not taught:
            raise UserError("`rewards` is empty: name at least one reward function, e.g. `rewards: [{fn: numeric}]`")
        for prompt in [*(source.prompts[0] for source in sources if isinstance(source.prompts, Sequence)), *(held_out or ())[:1]]:
            RewardManager(specs).check(prompt)
        models = [] if config.reward_model is None else [REWARD_MODEL]
        say(
            ", ".join([*(spec.name for spec in specs), *models])
            or ("none: a teacher says what is good" if taught else "given by the environment")
        )
    with building("algorithm", report) as say:
        algorithm = algorithms.from_config(config.algorithm, max_tokens=config.rollout.sampling.max_tokens, base=base)
        plan = BatchPlan.from_config(config.training, algorithm, config.rollout)
        critic = config.algorithm.critic if isinstance(config.algorithm, PPOConfig) else None
        planned_updates(algorithm, config.training, plan, critic)  # for its check of warm-ups and schedules
        mesh = make_mesh(actor_place(config.cluster, num_devices=jax.local_device_count(), num_processes=fleet.count))
        if mesh is not None:
            check_mesh(architecture, mesh)
        teacher = config.algorithm.teacher if isinstance(config.algorithm, OnPolicyDistillationConfig) else None
        if teacher is not None:
            check_teacher(teacher, codec, context=longest_sequence(config.rollout, architecture))
        if critic is not None:
            check_critic(critic, codec, context=longest_sequence(config.rollout, architecture), mesh=mesh)
        make_engine = engine_maker(config.rollout, base=base)
        say(f"{config.algorithm.name}, groups of {algorithm.num_generations}")
    outputs = sinks()
    with building("model", report) as say:
        model = load_model(folder, template_kwargs=config.data.chat_template_kwargs, mesh=mesh)
        say(f"{model.config.family}, {model.config.num_layers} layers, width {model.config.width}")
    with building("cluster", report) as say:
        cluster = RLCluster(
            model,
            lora=adapter_options(config.model, base),
            precision=config.model.precision,
            cluster=config.cluster,
            rollout=config.rollout,
            training=config.training,
            critic=critic,
            reward_model=config.reward_model,
            teacher=teacher,
            engine=make_engine,
            logs=Path(config.run.folder) / config.run.name / "servers",
            fleet=fleet,
            seed=config.run.seed,
        )
        if config.reward_model is not None:
            # Without a time limit: a group's wait for its turn on the devices would count.
            specs.append(RewardSpec(REWARD_MODEL, cluster.get_rewards, config.reward_model.weight, timeout_s=None))
        trained = "every weight" if config.model.lora is None else f"an adapter of rank {config.model.lora.rank}"
        say(f"products in {cluster.precision}, {trained} is trained, {config.rollout.slots} slots of {cluster.context} tokens")
    try:
        return RLLearner(
            cluster,
            algorithm,
            reward_fns=specs,
            train_ds=stream,
            eval_ds=held_out,
            agent_class=agent_class,
            agent_kwargs=options,
            env_class=env_class,
            env_kwargs=world,
            limits=config.environment.limits,
            ray=config.environment.ray,
            run=config.run,
            sinks=outputs,
        )
    except BaseException:
        cluster.close()
        raise


@contextlib.contextmanager
def building(name: str, report: Report) -> Iterator[Report]:
    """Report a finished step with what was found and the seconds it took; put its name before a user's mistake."""
    start, found = time.monotonic(), []
    try:
        yield found.append
    except BurnishError as error:
        raise type(error)(f"{name}: {error}") from error
    report(f"{name:<10} {' '.join(found)} ({time.monotonic() - start:.1f} s)")


def adapter_options(model: ModelSection, base: Path) -> LoraConfig | None:
    """With the folder that it starts from as found beside the configuration, else from here."""
    lora = model.lora
    if lora is None or lora.path is None:
        return lora
    return lora.model_copy(update={"path": found_folder(lora.path, base)})


def found_folder(path: str, base: Path) -> str:
    """A model's or an adapter's folder as found beside the configuration, else from here; a name as it is."""
    return _absolute(path, "path", base)


def agent_options(config: Config, base: Path) -> dict[str, Any]:
    """The agent's options; tools that are named, as a bare name of `burnish.agentic.toolbox` or `my_pkg.mod:Tool`, as what they mean.

    An entry that is a mapping is an MCP server, with its `command` or `url`: all its tools are there, their names after the entry's.
    """
    options = dict(config.agent.options)
    if isinstance(tools := options.get("tool_map"), dict):
        found: dict[str, Any] = {}
        for name, tool in tools.items():
            if isinstance(tool, dict):
                check_options(McpServer, tool, what=f"MCP server `{name}`")
                found |= McpServer(**tool).tools(prefix=f"{name}_")
            else:
                found[name] = resolve(tool, kind="tool", module=toolbox, base=base)
        options["tool_map"] = found
    return options


def environment_options(config: Config, base: Path) -> dict[str, Any]:
    """The environment's options; a program that is named, `my_pkg.mod:play` or `./file.py:play`, as what it means."""
    options = dict(config.environment.options)
    if isinstance(program := options.get("program"), str):
        options["program"] = resolve(program, kind="program", base=base)
    return options


def make_sources(data: DataSection, sources: Sequence[SourceConfig], base: Path, *, reader: type[RowReader] = RowReader) -> list[Source]:
    """The sources that a configuration names. reader: of the rows."""
    if not sources:
        raise UserError("`data.train` names no source: give a file (`path`) or a recipe (`recipe`)")
    return [_source(data, source, base, reader) for source in sources]


def _source(data: DataSection, source: SourceConfig, base: Path, reader: type[RowReader]) -> Source:
    shape: dict[str, Any] = {"prompt_key": data.prompt_key, "system_prompt": data.system_prompt, "reader": reader}
    if source.path is not None:
        near, here = base / source.path, Path(source.path)
        return from_file(here if here.is_file() and not near.is_file() else near, name=source.name or source.path, **shape)
    recipe = source.recipe or ""
    create = resolve(recipe, kind="recipe", base=base, attribute="create_dataset")
    check_options(create, source.options, what=f"recipe `{recipe}`", complete=True)
    return from_recipe(create, source.options, name=source.name or recipe, **shape)


def reward_spec(reward: RewardConfig, base: Path) -> RewardSpec:
    """The function that a configuration names, its options bound and checked."""
    fn = resolve(reward.fn, kind="reward", module=rewards, base=base)
    check_options(fn, reward.options, what=f"reward `{reward.fn}`", reserved=("prompts", "completions", "conversations", "trajectories"))
    bound = functools.partial(fn, **reward.options) if reward.options else fn
    return RewardSpec(name=reward.fn.rpartition(":")[2], fn=bound, weight=reward.weight, timeout_s=reward.timeout_s)


def anchored(resolved: Resolved[AnyConfig]) -> Resolved[AnyConfig]:
    """The same configuration with the files that it names by their absolute paths: what a run keeps must mean the same from anywhere.

    Sources of prompts keep their names, from which their order is made. Which of its processes this is, is no part of a run.
    """
    base = resolved.base

    def named(source: dict[str, Any]) -> dict[str, Any]:
        return source | {"name": source["name"] or source["path"] or source["recipe"]}

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: item if name in USERS else walk(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return _absolute(value, key, base) if key in FILES and isinstance(value, str) else value

    values = resolved.config.model_dump()
    values["data"] |= {key: [named(source) for source in values["data"][key]] for key in ("train", "eval")}
    agent = values.get("agent", {"options": {}})  # runs on rows have none
    if isinstance(tools := agent["options"].get("tool_map"), dict):
        agent["options"] |= {"tool_map": {k: _absolute(tool, "fn", base) if isinstance(tool, str) else tool for k, tool in tools.items()}}
    world = values.get("environment", {"options": {}})
    if isinstance(program := world["options"].get("program"), str):
        world["options"] |= {"program": _absolute(program, "fn", base)}
    values["run"]["folder"] = str(Path(values["run"]["folder"]).resolve())
    if values["cluster"].get("distributed") is not None:
        values["cluster"]["distributed"]["process_id"] = None
    return dataclasses.replace(resolved, config=type(resolved.config).model_validate(walk(values)))


FILES = frozenset({"path", "recipe", "fn", "env", "agent", "engine"})
"""Keys whose values may name a file, `:attribute` behind it or not; `path` also a model's folder."""
USERS = frozenset({"options", "chat_template_kwargs"})
"""Sections whose keys are the user's: what stands there names no file that we know of."""


def _absolute(name: str, key: str, base: Path) -> str:
    place, colon, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    if key != "path" and not (place.endswith(".py") or "/" in place):  # a bare name, as `resolve` reads it, whatever folders there are
        return name
    near, here = base / place, Path(place)
    found = near if near.is_file() else here if here.is_file() or (place and key == "path" and here.is_dir()) else None
    return name if found is None else f"{found.resolve()}{colon}{attribute}"


def _count(stream: PromptStream) -> str:
    return "endless" if stream.num_rows is None else str(stream.num_rows)


def required(value: str, key: str, what: str) -> str:
    """The value, which can't be empty."""
    if not value:
        raise UserError(f"`{key}` isn't set: give {what}")
    return value
