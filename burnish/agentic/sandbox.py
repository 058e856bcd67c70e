"""The sandbox: runs programs that nobody has read, so that they can neither see, change, reach nor outlive anything.

Owns what a run is given, its limits, and what is said of its end. A run has user, network, PID, mount and IPC namespaces of its own (Linux
only), as root an unused user besides, resource limits, an empty environment and a small file system in memory that is gone with it:
`/work`, where it starts with the files it was given, and `/tmp`; the system and the interpreter are there to be read, homes, `/proc` and
`/sys` aren't. Nothing is carried from one run to the next. `Sandbox()` tries this out and raises `SandboxUnavailable` where any of it is
missing: there is no weaker way to run. The inside is `sandbox_process.py`; the Python tool and `rewards.code` call this.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from burnish.agentic import sandbox_process
from burnish.agentic.processes import descendants, kill_tree
from burnish.config.errors import UserError

Ending = Literal["exit", "signal", "timeout", "memory", "output"]
_UNUSED_IDS = 1_879_048_192
"""Users far above those that systems give out, also for containers."""
_START_S = 20.0
_WATCH_S = 0.1
_CHUNK = 65536
PYTHON = "python"
"""As the first word of a command: the interpreter that runs burnish, isolated from site packages unless the sandbox shows them."""


class SandboxUnavailable(UserError):
    """Isolation that is asked for isn't to be had here. Nothing is run without it."""


class SandboxError(Exception):
    """A run couldn't be made, and not by the fault of what should have run: never a reward."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a run may use. seconds: of the clock; cpu_seconds: of each process. memory_bytes: address space of each process, and what all
    together hold. disk_bytes: of all files, which are in memory too; file_bytes: of one. output_bytes: of each of stdout and stderr."""

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 64 * 2**20
    file_bytes: int = 16 * 2**20
    output_bytes: int = 64 * 2**10
    num_processes: int = 32
    num_files: int = 4096
    open_files: int = 128

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 < value < float("inf"):
                raise UserError(f"{name} of a sandbox must be finite and > 0, got {value!r}")

    @property
    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.num_processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a run. code: the exit code, below 0 a signal, None where a limit ended it. ended: how; "output" when it said more
    than `output_bytes`, of which that much is kept."""

    code: int | None
    ended: Ending
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.code == 0

    def told(self) -> str:
        """What was printed and how it ended, in words for a model or a person."""
        text = (self.stdout + self.stderr).decode("utf-8", errors="replace")
        why = {
            "exit": f"[exit code {self.code}]",
            "signal": f"[ended by signal {-self.code if self.code else 0}]",
            "timeout": "[stopped: it took too long]",
            "memory": "[stopped: it used too much memory]",
            "output": "[stopped: it printed too much]",
        }[self.ended]
        return text if self.ok and text else f"{text.rstrip()}\n{why}".strip()


@dataclass(frozen=True)
class Sandbox:
    """Makes runs, each by itself; raises `SandboxUnavailable` when it is made where there is no isolation.

    read_only: folders that runs may read beside the system's and Python's standard library, at the same paths; site packages are among
    them with `Sandbox(read_only=site_packages())`.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    read_only: Sequence[str] = ()

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"the sandbox needs Linux's namespaces, and this is {sys.platform}: nothing is run without isolation")
        for path in self.read_only:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise UserError(f"read_only of a sandbox names {path!r}, which is no absolute path that exists")
        if (tuple(self.read_only)) in _tried:
            return
        try:
            probe = self.run([PYTHON, "-c", _PROBE], limits=SandboxLimits(seconds=_START_S))
        except SandboxError as error:
            raise SandboxUnavailable(
                f"the sandbox can't isolate here: {error}. It needs user, network, PID and mount namespaces (sysctl "
                "user.max_user_namespaces, kernel.unprivileged_userns_clone; a container's seccomp profile); nothing is run without them"
            ) from None
        if not probe.ok or probe.stdout.decode().split() != ["2", "1000", "1"]:
            raise SandboxUnavailable(f"the sandbox isn't what it should be: a trial run said {probe.told()!r:.300}")
        _tried.add(tuple(self.read_only))

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = {},
        stdin: str | bytes = b"",
        environment: Mapping[str, str] = {},
        limits: SandboxLimits | None = None,
    ) -> Ran:
        """Run a command in `/work`, which holds `files` (relative paths) and nothing else; blocks until it and all that it started is gone.

        The first word is an absolute path in there, or `python`. Raises `SandboxError` where the run couldn't be made.
        """
        limits, start = limits or self.limits, time.monotonic()
        job = self._job(command, files, _bytes(stdin), environment, limits)
        ours, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sandbox_process.__file__, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,
                cwd="/",
                env={},
            )
        except OSError as error:
            os.close(ours)
            raise SandboxError(f"the sandbox's process can't be started: {error}") from error
        finally:
            os.close(theirs)
        with _Watch(process, ours, limits) as watch:
            ended = watch.to_the_end(job)
        return _ran(watch, ended, seconds=time.monotonic() - start)

    def _job(
        self, command: Sequence[str], files: Mapping[str, str | bytes], stdin: bytes, environment: Mapping[str, str], limits: SandboxLimits
    ) -> bytes:
        contents = [(_relative(path), _bytes(content)) for path, content in files.items()]
        if sum(len(content) for _, content in contents) > limits.disk_bytes:
            raise UserError(f"the files of a run are larger than disk_bytes, {limits.disk_bytes}")
        interpreter = os.path.realpath(sys.executable)
        first = [interpreter, "-I", "-B"] if command[0] == PYTHON else [command[0]]
        job = {
            "command": [*first, *command[1:]],
            "environment": dict(environment),
            "read_only": [os.path.realpath(sys.base_prefix), *self.read_only],
            "unused_id": _unused_id(),
            "rlimits": limits.rlimits,
            "disk_bytes": limits.disk_bytes,
            "num_files": limits.num_files,
            "files": [(path, 0o644, len(content)) for path, content in contents],
            "stdin": len(stdin),
        }
        return b"".join([json.dumps(job).encode(), b"\n", *(content for _, content in contents), stdin])


_tried: set[tuple[str, ...]] = set()
"""What trial runs of this process have shown, by the folders that were shown to them."""
_PROBE = "import os, socket; print(os.getpid(), os.getuid(), len(socket.if_nameindex()))"


def site_packages() -> list[str]:
    """Where this environment's packages are, for `Sandbox(read_only=...)`; let a run find them by `environment={"PYTHONPATH": ...}`
    and its own interpreter, as `python` doesn't look at the environment."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]


class _Watch:
    """The parent's side of one run: hands the job over, listens, and ends it at its limits."""

    def __init__(self, process: subprocess.Popen[bytes], reports: int, limits: SandboxLimits) -> None:
        self._process, self._limits = process, limits
        self.said = {name: bytearray() for name in ("stdout", "stderr", "reports")}
        assert process.stdout is not None and process.stderr is not None
        self._streams: dict[str, IO[bytes]] = {
            "stdout": process.stdout,
            "stderr": process.stderr,
            "reports": os.fdopen(reports, "rb", buffering=0),
        }

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._process.pid)
        self._process.wait()
        for stream in self._streams.values():
            stream.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def to_the_end(self, job: bytes) -> Ending | None:
        """None where it ended by itself, else the limit that it went over."""
        threading.Thread(target=self._hand_over, args=(job,), daemon=True).start()
        start = time.monotonic()
        deadline, look = start + _START_S, start + 2 * _WATCH_S
        with selectors.DefaultSelector() as selector:
            for name, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, name)
            began = False
            while selector.get_map():
                for key, _ in selector.select(max(0.0, min(deadline, look) - time.monotonic())):
                    chunk = os.read(key.fd, _CHUNK)
                    if not chunk:
                        selector.unregister(key.fileobj)
                        if key.data == "reports":
                            return self._rest()  # init has ended, and everything with it
                    elif self._take(key.data, chunk):
                        return "output"
                if not began and b'"started"' in self.said["reports"]:
                    began, deadline = True, time.monotonic() + self._limits.seconds
                if (now := time.monotonic()) > deadline:
                    return "timeout" if began else None
                if now > look:
                    if began and self._resident_bytes() > self._limits.memory_bytes:
                        return "memory"
                    look = now + _WATCH_S
        return self._rest()

    def _take(self, name: str, chunk: bytes) -> bool:
        """Keep what was said; whether that is more than it may say."""
        self.said[name] += chunk
        if name == "reports" or len(self.said[name]) <= self._limits.output_bytes:
            return False
        del self.said[name][self._limits.output_bytes :]
        return True

    def _rest(self) -> Ending | None:
        """Take what was still in the pipes when it ended; nobody is left to write more."""
        for name in ("stdout", "stderr"):
            os.set_blocking(self._streams[name].fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(self._streams[name].fileno(), _CHUNK):
                    if self._take(name, chunk):
                        return "output"
        return None

    def _hand_over(self, job: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already, and said why
            self._process.stdin.write(job)
            self._process.stdin.close()

    def _resident_bytes(self) -> int:
        total = 0
        for pid in descendants(self._process.pid):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total


def _ran(watch: _Watch, ended: Ending | None, *, seconds: float) -> Ran:
    reports = [json.loads(line) for line in bytes(watch.said["reports"]).splitlines() if line.endswith(b"}")]
    for report in reports:
        if "error" in report:
            raise SandboxError(report["error"])
    code = next((report["exit"] for report in reports if "exit" in report), None)
    if ended is None and code is None:
        raise SandboxError(f"it ended without a word; {bytes(watch.said['stderr']).decode(errors='replace').strip()[-300:]}")
    if ended is None and code == -signal.SIGXCPU:
        ended = "timeout"
    elif ended is None:
        ended = "exit" if code is not None and code >= 0 else "signal"
    return Ran(code if ended in ("exit", "signal") else None, ended, bytes(watch.said["stdout"]), bytes(watch.said["stderr"]), seconds)


def _relative(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or not parts.parts or ".." in parts.parts or "\0" in path or len(path) > 1000:
        raise UserError(f"a file of a run must be named by a relative path without `..`, got {path!r:.100}")
    return str(parts)


def _unused_id() -> int | None:
    """A user and group that nothing belongs to; None where this process may not become somebody else."""
    if os.geteuid() != 0:
        return None
    chosen = _UNUSED_IDS + secrets.randbelow(2**20)
    with open("/proc/self/uid_map") as lines:
        if not any(int(first) <= chosen < int(first) + int(count) for first, _, count in map(str.split, lines)):
            return None
    try:
        pwd.getpwuid(chosen)
    except KeyError:
        return chosen
    raise SandboxError(f"the user {chosen} isn't unused")


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text


__all__ = ["PYTHON", "Ran", "Sandbox", "SandboxError", "SandboxLimits", "SandboxUnavailable", "site_packages"]
