"""`burnish rewards check CONFIG [KEY=VALUE ...]`: grade a data set's own answers with the run's reward functions, without a model.

Each row's answer must earn the reward, and the next row's different answer mustn't. Exit code 0 where both hold, 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import TYPE_CHECKING, Any

from burnish.cli.options import add_config_arguments, load
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.rewards.check import GraderReport
    from burnish.types import Prompt


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("rewards", help="try reward functions on a data set's own answers", description=__doc__)
    parser.add_argument("what", choices=["check"], help="check: grade the gold answers")
    add_config_arguments(parser)
    form = "an answer as the model would write it, with the row's columns in braces (default '{answer}'), e.g. '\\boxed{{{answer}}}'"
    parser.add_argument("--answer", default="{answer}", metavar="TEXT", help=form)
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="rows of each source (default 100)")
    parser.add_argument("--expected", type=float, default=1.0, metavar="R", help="what a right answer earns (default 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.config.schema import Config

    resolved = load(args, Config)

    from burnish.agentic.calls import Calls
    from burnish.agentic.workers import WorkerPool
    from burnish.cli.build import make_sources, reward_spec
    from burnish.rewards.check import check_graders

    config, base = resolved.config, resolved.base
    if not config.rewards:
        raise UserError("`rewards` is empty: name at least one reward function, e.g. `rewards: [{fn: numeric}]`")
    specs = [reward_spec(reward, base) for reward in config.rewards]
    sources = make_sources(config.data, [*config.data.train, *config.data.eval], base)
    pool, bad = WorkerPool(os.cpu_count() or 1), 0
    try:
        for source in sources:
            prompts = list(itertools.islice(source.prompts, args.rows))
            answers = {prompt.id: _answer(prompt, args.answer) for prompt in prompts}
            for report in check_graders(specs, prompts, answers, expected=args.expected, runner=Calls(pool)):
                _show(report, source.name, args.expected)
                bad += not report.good
    finally:
        pool.close()
    return min(bad, 1)


def _show(report: GraderReport, source: str, expected: float) -> None:
    own, others = report.count - len(report.refused), len(report.fooled)
    print(f"{report.name} on {source}: {own} of {report.count} own answers earn {expected:g}, {others} of {report.tried} others do")
    for whose, found in (("its own", report.refused), ("another row's", report.fooled)):
        for name, text, got in found[:3]:
            print(f"  {name}: {whose} answer {text!r:.80} gets {got:.200}")


def _answer(prompt: Prompt, form: str) -> str:
    try:
        return form.format_map(prompt.meta)
    except (KeyError, ValueError, IndexError) as error:
        columns = ", ".join(sorted(prompt.meta))
        raise UserError(f"--answer {form!r} can't be filled in for {prompt.id}: {error}; its columns are: {columns}") from error
