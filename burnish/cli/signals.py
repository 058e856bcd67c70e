"""What SIGTERM and SIGINT do to a run: the first asks it to stop with its state saved, a second ends the process at once.

Owns the handlers and the exit codes. A scheduler's SIGTERM and a person's Ctrl-C differ in the code only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""Of a run that a signal stopped. 75 is sysexits' "try again later", apart from every failure: the run goes on with `--resume`."""


@dataclass
class Received:
    """Which signal has asked the run to stop; None until one does."""

    signal: signal.Signals | None = None


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[], None], at_once: Callable[[int, str], None]) -> Iterator[Received]:
    """Call `stop` at the first signal. At a second, call `at_once(exit code, cause)` and leave the process without any clean-up.

    Only the main thread may use it; the handlers that were there come back at the end.
    """
    received = Received()

    def handle(number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if received.signal is not None:
            _say(f"{which.name} again: leaving at once")
            at_once(128 + number, f"{which.name} twice")
            os._exit(128 + number)
        received.signal = which
        _say(f"{which.name}: stopping with the last whole step saved; once more to leave at once")
        stop()

    before = {number: signal.signal(number, handle) for number in EXIT_CODES}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    os.write(2, f"burnish: {text}\n".encode())  # not `print`: the signal may have come in the middle of one
