"""What SIGTERM, SIGHUP and SIGINT do to a run: the first asks it to stop with its state saved, a second ends the process at once.

Owns the handlers and the exit codes. A scheduler's SIGTERM, a closed terminal's SIGHUP and a person's Ctrl-C differ in the code only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from burnish.config.errors import BurnishError

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
"""Of a run that a signal stopped. 75 is sysexits' "try again later", apart from every failure: the run goes on with `--resume`."""


class StoppedBeforeTheStart(BurnishError):
    """A signal came while the run was still being built: there is nothing to save."""


@dataclass
class Stopping:
    """Which signal has asked the run to stop, None until one does, and who is told."""

    signal: signal.Signals | None = None
    stop: Callable[[], None] | None = None
    """Asks the run to end soon; None while nothing runs that could be asked: then the signal raises `StoppedBeforeTheStart`."""

    def ask(self) -> None:
        if self.stop is not None:
            self.stop()
            return
        assert self.signal is not None, "told by a signal"
        stopped = StoppedBeforeTheStart(f"stopped by {self.signal.name} before the first step: go on with --resume")
        stopped.exit_code = EXIT_CODES[self.signal]
        raise stopped


@contextlib.contextmanager
def stopping_on_signals(at_once: Callable[[int, str], None]) -> Iterator[Stopping]:
    """Pass the first signal on. At a second, call `at_once(exit code, cause)` and leave the process without any clean-up.

    Only the main thread may use it; the handlers that were there come back at the end. A signal that is ignored (`nohup`) stays so.
    """
    stopping = Stopping()

    def handle(number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if stopping.signal is not None:
            _say(f"{which.name} again: leaving at once")
            at_once(128 + number, f"{which.name} twice")
            os._exit(128 + number)
        stopping.signal = which
        _say(f"{which.name}: stopping with the last whole step saved; once more to leave at once")
        stopping.ask()

    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield stopping
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _say(text: str) -> None:
    os.write(2, f"burnish: {text}\n".encode())  # not `print`: the signal may have come in the middle of one
