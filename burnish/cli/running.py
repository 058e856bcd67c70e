"""A run from its folder's lock to its last line: what the commands that train have in common.

Owns the folder, the sinks, going on with `--resume`, what a signal does, and the status in the end. What is built and how its result is
told is each command's.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from burnish.checkpoint.saver import Saver
from burnish.cli.build import anchored
from burnish.cli.options import AnyConfig
from burnish.cli.resume import check_same_run, is_complete
from burnish.cli.signals import EXIT_CODES, Stopping, stopping_on_signals
from burnish.config.errors import UserError
from burnish.config.loader import Resolved, dump_config
from burnish.config.secrets import scrub
from burnish.observe.devices import ProfileSink
from burnish.observe.display import ProgressSink
from burnish.observe.health import HealthSink
from burnish.observe.run_folder import CHECKPOINTS, RunFolder
from burnish.observe.sinks import JsonlSink, Sink, Sinks
from burnish.observe.telemetry import SpanExport
from burnish.observe.trace_writer import TraceWriter
from burnish.observe.trackers import make_tracker
from burnish.observe.transcripts import TranscriptSink
from burnish.rl.fleet import ALONE, Fleet, digest, leaders, require_same
from burnish.rl.replay import EpisodeSink
from burnish.rollout.engine import wait_for


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


SPANS = "otel"
"""The tracker that gets spans in place of metrics."""
TALK = "Talk to it: burnish chat {run}"
"""What a person does with most results."""
Finish = Callable[[R, Path], Path]
"""Exports what was trained into the run's folder and tells how it went; returns where it is."""


def run_in_folder(
    args: Namespace,
    resolved: Resolved[AnyConfig],
    *,
    step: int | None,
    build: Callable[[Callable[[], Sequence[Sink]]], tuple[Learner[R], Finish[R]]],
    transcript_tokens: int | None = None,
    keep_episodes: bool = False,
    sample_every: int = 1,
    next_step: str = TALK,
    fleet: Fleet = ALONE,
) -> int:
    """Build a learner and run it in the folder that `resolved` names; returns the exit code.

    step: the one to go on from, None for the newest, if `args.resume` asks for it. build: gets what makes the sinks, to be called once all
    that can be wrong before loading weights was checked. transcript_tokens: of an episode, written one by one; None writes no episodes.
    keep_episodes: whole ones, to be replayed. fleet: the processes of the run; the folder and what is printed are the first's.
    """
    shown: dict[str, Any] = {"transcript_tokens": transcript_tokens, "keep_episodes": keep_episodes, "sample_every": sample_every}
    run = _Run(resolved, step=step, resuming=args.resume is not None, **shown, fleet=fleet)
    try:
        with stopping_on_signals(run.fail) as stopping:
            return run.go(build, stopping, next_step) if run.has_work() else 0
    except BaseException as error:
        cause = fleet.cause_of(error)
        run.end_with(cause)
        if cause is error:
            raise
        raise cause from error


class _Run(Generic[AnyConfig]):
    def __init__(
        self,
        resolved: Resolved[AnyConfig],
        *,
        step: int | None,
        resuming: bool,
        transcript_tokens: int | None,
        keep_episodes: bool,
        sample_every: int,
        fleet: Fleet,
    ) -> None:
        self._config, self._kept = resolved.config, anchored(resolved)
        self._step, self._resuming = step, resuming
        self._transcript_tokens, self._keep_episodes = transcript_tokens, keep_episodes
        self._sample_every, self._fleet = sample_every, fleet
        self._path = Path(self._config.run.folder) / self._config.run.name
        self._folder: RunFolder | None = None
        self._written: list[JsonlSink | HealthSink | TranscriptSink | EpisodeSink] = []
        self._made: Sequence[Sink] = ()
        self._saver: Saver | None = None
        fleet.on_leaving(self.fail)

    def has_work(self) -> bool:
        """Whether anything is left to do. Raises UserError where it can't be, ProcessesDiffer where another process was asked otherwise."""
        asked = digest(sorted(self._kept.config.model_dump().items()))
        wait_for(require_same(self._fleet, "learner", "configurations (digest)", asked))
        # The first process has looked whether there is a folder; another may have come when it was made.
        self._resuming = leaders(self._fleet, "learner", self._resuming)
        self._step = leaders(self._fleet, "learner", self._step)
        if not self._resuming:
            return True
        if leaders(self._fleet, "learner", self._step is None and is_complete(self._path, self._config)):
            self._say(f"the run in {self._path} is complete: nothing is left to do")
            return False
        for change in check_same_run(self._path, self._kept, step=self._step) if self._fleet.leads else ():
            print(f"changed since the start: {change}", file=sys.stderr)
        return True

    def go(self, build: Callable[[Callable[[], Sequence[Sink]]], tuple[Learner[R], Finish[R]]], stopping: Stopping, next_step: str) -> int:
        try:
            learner, finish = build(self._sinks)
        except BaseException:
            Sinks(self._made).close()  # no learner has taken them
            raise
        assert self._saver is not None, "made with the sinks"
        with learner:
            if self._resuming:
                self._go_on(learner, self._saver)
            if self._folder is not None:
                self._folder.write_config(dump_config(self._kept))
            stopping.stop = learner.stop
            result = learner.train(saver=self._saver)
        if result.stopped:  # by a signal, which another process may be the only one to have got
            return self._stopped(stopping.signal or signal.SIGTERM, result.steps, self._saver.committed_step)
        exported = finish(result, self._path)
        if self._folder is not None:
            self._folder.complete()
        self._say(f"{result.steps} steps done; {exported} holds the result. {next_step.format(run=self._path, exported=exported)}")
        return 0

    def fail(self, code: int, cause: str) -> None:
        if self._folder is not None:
            self._folder.fail(exit_code=code, cause=cause)

    def end_with(self, error: BaseException) -> None:
        if self._folder is not None:
            self._folder.__exit__(type(error), error, error.__traceback__)

    def _say(self, text: str) -> None:
        if self._fleet.leads:
            print(text, flush=True)

    def _sinks(self) -> Sequence[Sink]:
        """The run's folder and everything that writes in it; of processes that don't lead only their part in saving."""
        config = self._config
        if not self._fleet.leads:
            self._saver = Saver(self._path / CHECKPOINTS, config.checkpoint, fleet=self._fleet)
            return []
        folder = self._folder = RunFolder(config.run.folder, config.run.name, resume=self._resuming)
        self._saver = Saver(folder.checkpoints_path, config.checkpoint, fleet=self._fleet)
        most = self._transcript_tokens
        lines, texts = [JsonlSink(folder), HealthSink(folder)], [] if most is None else [TranscriptSink(folder, max_tokens=most)]
        kept = [EpisodeSink(folder.path)] if self._keep_episodes else []
        self._written = [*lines, *texts, *kept]
        others: list[Sink] = [*self._tracing(folder)]
        options = json.loads(scrub(json.dumps(self._kept.config.model_dump(mode="json"))))
        if config.observe.profile is not None:
            first, last = map(int, config.observe.profile.split("-"))
            others.append(ProfileSink(folder.path / "profile", first, last))
        others += [make_tracker(kind, folder.path, config=options) for kind in config.observe.trackers if kind != SPANS]
        self._made = [*lines, ProgressSink(sample_every=self._sample_every, live=config.observe.progress), *texts, *kept, *others]
        return self._made

    def _tracing(self, folder: RunFolder) -> list[Sink]:
        """The writer of the trace, and the exporter that hears of its spans, which is closed after it."""
        most_bytes, exports = self._config.observe.trace_mib * 2**20, SPANS in self._config.observe.trackers
        if not most_bytes and exports:
            raise UserError(f"observe.trackers has {SPANS}, which sends the spans of the trace, but observe.trace_mib is 0: set it")
        if not exports:
            return [TraceWriter(folder.trace_path, most_bytes=most_bytes)] if most_bytes else []
        export = SpanExport(folder.path.name)
        return [TraceWriter(folder.trace_path, most_bytes=most_bytes, then=export.take), export]

    def _go_on(self, learner: Learner[Any], saver: Saver) -> None:
        start = learner.resume(saver.folder, self._step)
        for sink in self._written:
            sink.rewind(start)
        if self._folder is not None:
            self._folder.begin()
        self._say(f"going on after step {start}" if start else "there is no checkpoint yet: starting from the beginning")

    def _stopped(self, which: signal.Signals, steps: int, committed: int) -> int:
        last = f"step {committed} is saved" if committed else "no step is saved"
        cause = f"stopped by {which.name} after step {steps}; {last}: go on with --resume"
        self.fail(EXIT_CODES[which], cause)
        if self._fleet.leads:
            print(cause, file=sys.stderr)
        return EXIT_CODES[which]
