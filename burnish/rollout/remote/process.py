"""A server that burnish starts itself: its process, its log, its end.

Owns one operating system process group. The server dies with us, whatever happens to us: the kernel sends it SIGKILL when the thread that
started it is gone (Linux), and `stop` ends the whole group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_ENDS_WITH_US = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_GRACE_S = 10.0


class ServerProcess:
    """A running command. log: where all that it says goes; its end is quoted when it dies."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENDS_WITH_US, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ending(self) -> str | None:
        """How it ended, in words; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def ending_within(self, seconds: float) -> str | None:
        """The same, of one that may be dying: its connections break a moment before it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ending

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4000))
            return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-lines:])
        return ""

    def stop(self) -> None:
        """End the process group: asked first, killed after some seconds; what the server started ends with it."""
        group = self._process.pid
        _send(group, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        _send(group, signal.SIGKILL)
        self._process.wait()


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


__all__ = ["ServerProcess", "free_port"]
