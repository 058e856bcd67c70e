"""The inside of worker processes: a zygote that forks them, and each holds one object at a time and calls its methods for the parent.

Owns both loops, and that nothing of them outlives the parent. What an object needs is imported
when it arrives, jax excepted: a worker must never reach for an accelerator. Started by `workers.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from burnish import faults

FORBIDDEN = frozenset({"jax", "jaxlib"})
COMMAND_BYTES = 9
LEAK_BYTES = 512 * 2**20
"""Growth after which a worker is replaced by a new one."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Finder(MetaPathFinder):
    """Finds modules that the parent loaded from a file, and refuses jax."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"it imports {fullname}, which a worker process may not")
        return importlib.util.spec_from_file_location(fullname, self._files[fullname]) if fullname in self._files else None


def main(fd: int) -> None:
    """The zygote: fork a worker for each file descriptor that comes, and reap those that are asked for, until the parent closes its end.

    It has imported what environments need and runs one thread, so that a fork is cheap and safe. A command is a letter and a number.
    """
    os.dup2(2, 1)  # what user code prints isn't the parent's output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to deal with
    _adopt_orphans()
    control = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    importlib.import_module("burnish.agentic.environments")
    ended: dict[int, int] = {}
    while True:
        command, passed, *_ = socket.recv_fds(control, COMMAND_BYTES, 1)
        if not command:
            os._exit(0)
        if command[:1] == b"F":
            pid = os.fork()
            if pid == 0:
                control.close()
                _serve(passed[0])
            os.close(passed[0])
            control.sendall(pid.to_bytes(8, "big"))
        else:
            pid = int.from_bytes(command[1:], "big")
            while pid not in ended:  # others that end meanwhile, orphans among them, are reaped too
                child, status = os.wait()
                ended[child] = status
            control.sendall(os.waitstatus_to_exitcode(ended.pop(pid)).to_bytes(8, "big", signed=True))


def _serve(fd: int) -> None:
    """A worker: serve until the parent closes its end.

    A request is (number, verb, pickle): `load` an object; `run` one of its methods (name, arguments, attributes to be set before, fault
    point); `abandon`: run one although another hangs, on another thread. An answer is (number, kind, value, whether this process is
    spent).
    """
    os.setsid()
    _adopt_orphans()
    _die_with_parent()
    parent = Connection(fd)
    path, files = parent.recv()
    sys.path[:] = path
    sys.meta_path.insert(0, _Finder(files))
    base, held = _resident_bytes(), [None]
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent, requests, held), daemon=True).start()
    # Methods run on the main thread: libraries with time limits by signal refuse any other.
    while True:
        number, verb, blob = requests.get()
        answer = _load(held, blob) if verb == "load" else _run(held[0], blob)
        _send(parent, number, *answer, spent=_resident_bytes() - base > LEAK_BYTES)


def _read(parent: Connection, requests: queue.SimpleQueue[Any], held: list[Any]) -> None:
    while True:
        try:
            request = parent.recv()
        except (EOFError, OSError):
            os._exit(0)  # at once, also where the main thread hangs or other threads were left behind
        if request[1] == "abandon":
            _send(parent, request[0], *_run(held[0], request[2]), spent=True)
        else:
            requests.put(request)


def _load(held: list[Any], blob: bytes) -> tuple[str, Any]:
    try:
        held[0] = pickle.loads(blob)
    except BaseException as error:
        return "unloadable", f"{type(error).__name__}: {error}"
    return "ok", None


def _run(target: Any, blob: bytes) -> tuple[str, Any]:
    try:
        method, arguments, attributes, fault = pickle.loads(blob)
        for name, value in attributes.items():
            setattr(target, name, value)
        if fault is not None:
            faults.point(fault[0], **fault[1])
        return "ok", getattr(target, method)(*arguments)
    except BaseException as error:
        return "raised", describe(error)


def describe(error: BaseException) -> tuple[str, str]:
    """An exception in a line, with the place where it was raised, and its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}", "".join(traceback.format_exception(error))


_sending = threading.Lock()


def _send(parent: Connection, number: int, kind: str, value: Any, *, spent: bool) -> None:
    try:
        blob = pickle.dumps((number, kind, value, spent))
    except Exception as error:
        blob = pickle.dumps((number, "raised", (f"what it returned can't be sent from its process: {error}", ""), spent))
    with _sending, contextlib.suppress(OSError):
        parent.send_bytes(blob)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _die_with_parent() -> None:
    """On Linux also where this process hangs; elsewhere it ends when it hears that the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _adopt_orphans() -> None:
    """On Linux: whatever user code starts stays below this process in the tree, so that it can be found and killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
