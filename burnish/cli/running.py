"""A run from its folder's lock to its last line: what the commands that train have in common.

Owns the folder, the sinks, going on with `--resume`, what a signal does, and the status in the end. What is built and how its result is
told is each command's.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from burnish.checkpoint.saver import Saver
from burnish.cli.build import anchored
from burnish.cli.options import AnyConfig
from burnish.cli.resume import check_same_run, is_complete
from burnish.cli.signals import EXIT_CODES, stopping_on_signals
from burnish.config.loader import Resolved, dump_config
from burnish.observe.display import ProgressSink
from burnish.observe.run_folder import RunFolder
from burnish.observe.sinks import JsonlSink, Sink
from burnish.observe.trace import write_jsonl
from burnish.observe.transcripts import TranscriptSink


class Result(Protocol):
    """What `train` returns: the last step, and whether it was asked to stop before its end."""

    steps: int
    stopped: bool


R_co = TypeVar("R_co", bound=Result, covariant=True)
R = TypeVar("R", bound=Result)


class Learner(Protocol[R_co]):
    """What trains: an `RLLearner`, a `Trainer`. Leaving its context closes it."""

    def resume(self, checkpoints: Path, step: int | None = None) -> int: ...

    def train(self, *, saver: Saver | None = None) -> R_co: ...

    def stop(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...


Finish = Callable[[R, Path], Path]
"""Exports what was trained into the run's folder and tells how it went; returns where it is."""


def run_in_folder(
    args: Namespace,
    resolved: Resolved[AnyConfig],
    *,
    step: int | None,
    build: Callable[[Callable[[], Sequence[Sink]]], tuple[Learner[R], Finish[R]]],
    transcripts: bool = False,
    sample_every: int = 1,
) -> int:
    """Build a learner and run it in the folder that `resolved` names; returns the exit code.

    step: the one to go on from, None for the newest, if `args.resume` asks for it. build: gets what makes the sinks, to be called once all
    that can be wrong before loading weights was checked.
    """
    config, kept, resuming = resolved.config, anchored(resolved), args.resume is not None
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
        texts = TranscriptSink(folder) if transcripts else None
        progress = ProgressSink(sample_every=sample_every, live=config.observe.progress)
        return [lines, progress, *([] if texts is None else [texts])]

    def leave(code: int, cause: str) -> None:
        for folder in opened:
            folder.fail(exit_code=code, cause=cause)

    try:
        with stopping_on_signals(leave) as stopping:
            learner, finish = build(sinks)
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
            exported = finish(result, folder.path)
            write_jsonl(folder.trace_path)
            folder.complete()
    except BaseException as error:
        for folder in opened:
            folder.__exit__(type(error), error, error.__traceback__)
        raise
    print(f"{result.steps} steps done; {exported} holds the result. Talk to it: burnish chat {folder.path}")
    return 0
