"""Processes of the operating system: forking workers from a zygote, finding and killing everything that one has started.

Owns process ids and signals; what is said to a worker is `workers.py`'s, its inside `worker_process.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from burnish.agentic.worker_process import COMMAND_BYTES

_KILL_ROUNDS = 20


Search = tuple[list[str], dict[str, str]]


class Zygote:
    """The process that workers are forked from: started at the first, with what environments need imported once for all.

    search: where modules are found (see `search_here`), where that isn't as here: a trainer's on another machine.
    """

    def __init__(self, search: Search | None = None) -> None:
        self._search = search
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[Connection, int]:
        """A new worker's connection and process id. Raises OSError where there can't be one."""
        with self._lock:
            control = self._control or self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(control, [b"F".ljust(COMMAND_BYTES)], [theirs.fileno()])
            pid = self._answer(control)
        connection = Connection(ours.detach())
        connection.send(self._search or search_here())
        return connection, pid

    def reap(self, pid: int) -> int | None:
        """Wait for a worker that was killed or has ended; its exit code. Until then its process id belongs to nobody else."""
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(b"R" + pid.to_bytes(COMMAND_BYTES - 1, "big"))
                return self._answer(self._control)
        return None

    def close(self) -> None:
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                kill_tree(self._process.pid)
                self._process.wait()
            self._process = self._control = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "burnish.agentic.worker_process", str(theirs.fileno())]
            search = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            # One thread for linear algebra: forks must find no others, and workers share the machine's cores.
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            nowhere = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            environment = alone | os.environ | {"PYTHONPATH": os.pathsep.join(search)} | nowhere
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        self._control = ours
        return ours

    def _answer(self, control: socket.socket) -> int:
        answer = control.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise OSError("the process that workers are forked from has ended")
        return int.from_bytes(answer, "big", signed=True)


def search_here() -> Search:
    """Where this process finds modules: `sys.path`, and the files of those that were named by a file."""
    return sys.path, {name: str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith("burnish_file_")}


def kill_tree(pid: int) -> None:
    """Kill a process that leads its session, its group, and on Linux every descendant, those with sessions of their own included.

    Workers adopt the orphans of what they start, so a chain of parents leads to each; the worker is stopped first, so that it starts none.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for _ in range(_KILL_ROUNDS):
        found = descendants(pid)
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The living descendants of a process; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found, front = [], [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


__all__ = ["Search", "Zygote", "descendants", "kill_tree", "search_here"]
