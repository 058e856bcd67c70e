"""`burnish train CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: reinforcement learning as a configuration describes it.

A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step that is named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from burnish.cli.options import add_config_arguments, load
from burnish.config.errors import UserError

NEWEST = "newest"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train a policy by reinforcement learning", description=__doc__)
    add_config_arguments(parser)
    help_text = "go on with the run in the folder, from its newest checkpoint or from STEP"
    parser.add_argument("--resume", nargs="?", const=NEWEST, metavar="STEP", help=help_text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    step = _resumed_step(args)
    resolved = load(args)

    from burnish.checkpoint.saver import Saver
    from burnish.cli.build import anchored, build_learner
    from burnish.cli.resume import check_same_run, is_complete
    from burnish.cli.signals import EXIT_CODES, stopping_on_signals
    from burnish.config.loader import dump_config
    from burnish.observe.display import ProgressSink
    from burnish.observe.run_folder import RunFolder
    from burnish.observe.sinks import JsonlSink, Sink
    from burnish.observe.trace import write_jsonl
    from burnish.observe.transcripts import TranscriptSink
    from burnish.rl.evaluation import paired_change

    config, kept = resolved.config, anchored(resolved)
    resuming = args.resume is not None
    path = Path(config.run.folder) / config.run.name
    if resuming:
        if step is None and is_complete(path, config):
            print(f"the run in {path} is complete: nothing is left to do")
            return 0
        for change in check_same_run(path, kept, step=step):
            print(f"changed since the start: {change}", file=sys.stderr)
    opened: list[RunFolder] = []
    saver: Saver | None = None
    lines: JsonlSink | None = None
    texts: TranscriptSink | None = None

    def sinks() -> list[Sink]:
        nonlocal saver, lines, texts
        folder = RunFolder(config.run.folder, config.run.name, resume=resuming)
        opened.append(folder)
        saver, lines = Saver(folder.checkpoints_path, config.checkpoint), JsonlSink(folder)
        texts = TranscriptSink(folder) if config.observe.transcripts else None
        progress = ProgressSink(sample_every=config.observe.sample_every, live=config.observe.progress)
        return [lines, progress, *([] if texts is None else [texts])]

    def leave(code: int, cause: str) -> None:
        for folder in opened:
            folder.fail(exit_code=code, cause=cause)

    try:
        with stopping_on_signals(leave) as stopping:
            learner = build_learner(resolved, sinks=sinks, report=lambda line: print(line, flush=True))
            assert saver is not None and lines is not None, "made by sinks()"
            folder = opened[0]
            with learner:
                start = learner.resume(folder.checkpoints_path, step) if resuming else 0
                if resuming:
                    lines.rewind(start)
                    if texts is not None:
                        texts.rewind(start)
                    folder.begin()
                    print(
                        f"going on after step {start}" if start else "there is no checkpoint yet: starting from the beginning", flush=True
                    )
                folder.write_config(dump_config(kept))
                stopping.stop = learner.stop
                result = learner.train(saver=saver)
            if stopping.signal is not None and result.stopped:
                code = EXIT_CODES[stopping.signal]
                last = f"step {saver.committed_step} is saved" if saver.committed_step else "no step is saved"
                cause = f"stopped by {stopping.signal.name} after step {result.steps}; {last}: go on with --resume"
                folder.fail(exit_code=code, cause=cause)
                print(cause, file=sys.stderr)
                return code
            exported = learner.cluster.export(folder.path)
            write_jsonl(folder.trace_path)
            before, after = result.evaluations.get(0, {}), result.evaluations.get(result.steps, {})
            for label in before.keys() & after.keys():
                change = paired_change(before[label], after[label], clusters=learner.held_out_clusters)
                print(f"{label}: {100 * change.difference:+.1f} points (95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f})")
            folder.complete()
    except BaseException as error:
        for folder in opened:
            folder.__exit__(type(error), error, error.__traceback__)
        raise
    print(f"{result.steps} steps done; {exported} holds the result. Talk to it: burnish chat {folder.path}")
    return 0


def _resumed_step(args: argparse.Namespace) -> int | None:
    """The step to go on from; None for the newest, or for a new run.

    argparse takes the word behind a bare `--resume` for its value: one that is no step is the file, or an override.
    """
    if args.resume is None or args.resume == NEWEST:
        return None
    if args.resume.isdecimal():
        return int(args.resume)
    if "=" in args.resume:
        args.overrides = [*args.overrides, args.resume]
    elif Path(args.resume).is_file():
        args.overrides = [*([args.config] if args.config else []), *args.overrides]
        args.config = args.resume
    else:
        raise UserError(f"--resume {args.resume!r} is neither a step (a whole number; without one the newest) nor a configuration file")
    args.resume = NEWEST
    return None


__all__ = ["add_parser", "run"]
