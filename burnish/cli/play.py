"""`burnish play CONFIG|ENV [KEY=VALUE ...]`: be the model. You see exactly what it would see, and what you type is its reply.

CONFIG: a run's configuration, whose environment, agent, limits and rewards are played on a row of its data. ENV: an environment by itself
(`GymText`, `./file.py:Class`, …), on the task that `--task` gives. With the configuration's model (or `--model`) the text is shown as its
chat template writes it; otherwise by roles. A line is a reply; one that ends with a backslash goes on in the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.options import add_config_arguments, load
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.loader import Resolved
    from burnish.config.schema import Config
    from burnish.text.chat import Rendering
    from burnish.types import Message, Prompt, Request, Trajectory

END = 0
"""The id that ends a reply where there is no model: all others are characters."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("play", help="play an environment yourself, seeing what the model would see", description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--task", metavar="JSON", help="the row of data to play on, e.g. '{\"seed\": 3}'; without it one of the data's")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="which row of the held-out data, else of the training data")
    parser.add_argument("--model", metavar="PATH", help="whose tokenizer and chat template write the text (no weights are loaded)")
    parser.add_argument("--seed", type=int, default=0, help="seed of a task that brings none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.config.schema import Config

    if args.config and "=" not in args.config and not Path(args.config).is_file():
        args.overrides, args.config = [f"environment.env={args.config}", *args.overrides], None
    resolved = load(args, Config)
    try:
        _tell(_play(resolved, args))
    except Left:
        print("\n--- you left before the end: nothing is graded")
    return 0


class Left(Exception):
    """The input has ended."""


def _play(resolved: Resolved[Config], args: argparse.Namespace) -> Trajectory:
    """One episode, by the collector that plays a model's."""
    import asyncio

    from burnish.agentic import agents, worlds
    from burnish.agentic.calls import Calls
    from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
    from burnish.cli.build import agent_options, environment_options, reward_spec
    from burnish.config.resolve import check_options, resolve
    from burnish.models.locate import locate
    from burnish.rewards.manager import RewardManager
    from burnish.rollout.scripted import ScriptedEngine
    from burnish.text.codec import Codec
    from burnish.types import Group, SamplingParams

    config, base = resolved.config, resolved.base
    env_class = resolve(config.environment.env, kind="environment", module=worlds, base=base)
    world = environment_options(config, base)
    check_options(env_class, world, what=f"environment `{config.environment.env}`", reserved=("task",))
    agent_class, options = resolve(config.agent.agent, kind="agent", module=agents, base=base), agent_options(config, base)
    check_options(agent_class, options, what=f"agent `{config.agent.agent}`")
    agent, prompt = agent_class(**options), _prompt(resolved, args)
    env = env_class({**prompt.meta, "prompt": list(prompt.messages)}, **world)
    model = args.model or config.model.path
    if model:
        codec = Codec.load(locate(model), template_kwargs=config.data.chat_template_kwargs)
        template, stops, encode = codec.template, codec.template.stop_ids, codec.tokenizer.encode
        longest, prompt_limit = config.rollout.longest_sequence, config.rollout.max_prompt_tokens
        params = SamplingParams(config.rollout.sampling.max_tokens, stop_ids=stops)

        def decode(ids: Sequence[int]) -> str:
            return codec.tokenizer.decode(ids)

        def show(ids: Sequence[int]) -> str:
            return codec.tokenizer.decode(ids, skip_special=False)
    else:
        template, stops, encode, decode = Characters(), (END,), Characters.encode, Characters.decode
        longest, prompt_limit, params, show = 10**7, 10**6, SamplingParams(10**5, stop_ids=(END,)), decode
    player = Player(lambda text: [*encode(text), stops[0]], show)
    context = EpisodeContext(
        engine=ScriptedEngine(player.reply, decode_text=decode),
        template=template,
        decode=decode,
        context=longest,
        max_prompt_tokens=prompt_limit,
        limits=config.environment.limits,
        calls=Calls(None),
    )
    collector = TrajectoryCollectEngine(context, params=params, seed_path=(0, 0, 0, 0))

    async def episode() -> Trajectory:
        played = await collector.collect(agent, env, group=(0, 0), sample=0)
        await RewardManager([reward_spec(reward, base) for reward in config.rewards]).score(Group((0, 0), prompt, [played]))
        return played

    return asyncio.run(episode())


def _prompt(resolved: Resolved[Config], args: argparse.Namespace) -> Prompt:
    """The row to be played on."""
    from burnish.cli.build import make_sources
    from burnish.data.source import from_rows

    data = resolved.config.data
    if args.task is not None:
        try:
            task = json.loads(args.task)
        except ValueError as error:
            raise UserError(f"--task is no JSON: {error}") from error
        if not isinstance(task, dict):
            raise UserError(f"--task must be a JSON object, the row of data; got {args.task!r:.80}")
        rows = [{"prompt": "", "seed": args.seed} | task]
        return next(iter(from_rows(rows, name="task", system_prompt=data.system_prompt).prompts))
    named = data.eval or data.train
    if not named:
        return next(iter(from_rows([{"prompt": "", "seed": args.seed}], name="task").prompts))
    (source, *_) = make_sources(data, named, resolved.base)
    found = next(itertools.islice(source.prompts, args.row, None), None)
    if found is None:
        raise UserError(f"{source.name} has no row {args.row}")
    return found


class Player:
    """Whoever sits at the terminal, as an engine's reply."""

    def __init__(self, encode: Callable[[str], list[int]], show: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._show = encode, show
        self._seen: list[int] = []

    def reply(self, request: Request) -> list[int]:
        """Show what is new in the prompt, then read a reply."""
        ids = list(request.prompt_ids)
        if self._seen and ids[: len(self._seen)] == self._seen:
            text = self._show(ids[len(self._seen) :])
        else:
            text = ("\n--- the conversation is shown anew ---\n" if self._seen else "") + self._show(ids)
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        said = self._read()
        reply = self._encode(said)
        self._seen = [*ids, *reply]
        return reply

    def _read(self) -> str:
        lines: list[str] = []
        try:
            while True:
                line = input("> " if sys.stdin.isatty() else "")
                lines.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    return "\n".join(lines)
        except EOFError:
            raise Left from None


class Characters:
    """A chat template of roles in plain words, and a tokenizer of characters: for playing without a model."""

    takes_tools = False

    @staticmethod
    def encode(text: str) -> list[int]:
        return [ord(letter) + 1 for letter in text]

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(index - 1) for index in ids if index != END)

    def start(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering:
        from burnish.text.chat import Rendering

        text = "".join(f"[{message['role']}]\n{message['content']}\n" for message in messages) + "[assistant]\n"
        return Rendering(text, self.encode(text))

    def follow(
        self, begun: Rendering, reply: str, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, ended: bool
    ) -> Rendering | None:
        whole = self.start(messages)
        kept = f"{begun.text}{reply}\n"
        if not whole.text.startswith(kept):
            return None
        from burnish.text.chat import Rendering

        return Rendering(whole.text, self.encode(whole.text[len(kept) :]))


def _tell(played: Trajectory) -> None:
    """How it ended, and what it earned."""
    last = played.steps[-1] if played.steps else None
    if last is not None and last.observation:
        print(last.observation if isinstance(last.observation, str) else "\n".join(message["content"] for message in last.observation))
    steps = ", ".join("none" if step.reward is None else f"{step.reward:g}" for step in played.steps)
    print(f"--- {played.status} after {len(played.steps)} turns{f': {played.error}' if played.error else ''}")
    print(f"rewards of the turns: {steps or 'none'}")
    for name, value in played.rewards.items():
        print(f"{name}: {'none' if value is None else f'{value:g}'}")
    print(f"reward: {'none' if played.reward is None else f'{played.reward:g}'}")
