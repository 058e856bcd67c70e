"""The folder of one run: who owns it, what state the run is in, which configuration it had.

Owns `lock`, `status.json` and `config.yaml`, and the names of everything else that a run writes; the files themselves are written by
the sinks, the checkpointer and the exporter. The commands and the learner open it before anything expensive.

One process owns a folder at a time. The lock is the operating system's (`flock`), so it goes with the process however that dies and no
one has to guess whether an old lock is stale; the pid and host in the file are for people, and for network file systems on which the
lock of another host can't be seen.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import re
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from burnish.config.errors import BurnishError, UserError
from burnish.config.secrets import scrub

CHECKPOINTS = "checkpoints"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

State = Literal["running", "complete", "failed"]


class RunFolderError(UserError):
    """The folder can't be used: owned by another process, holding another run's files, or not where it should be."""


class RunFolder:
    """An open, locked run folder. As a context manager it records how the run ended.

    A fresh run refuses a folder that already holds files; `resume=True` asks for exactly those, and changes nothing but the lock
    before `begin`, so that what can't go on is left as it was.
    """

    def __init__(self, root: str | Path, name: str, *, resume: bool = False) -> None:
        self.path = _resolve(Path(root), name)
        self.resumed = resume
        if resume and not self.path.is_dir():
            raise RunFolderError(f"there is no run to resume in {self.path}; check run.folder and run.name, or start it without --resume")
        self._begun = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(f"can't make the run folder {self.path}: {error.strerror}; set run.folder to a writable place") from error
        try:
            self._take_lock()
        except BaseException:
            os.close(self._lock)
            raise
        try:
            if not (resume and (self.path / "status.json").is_file()):
                self._refuse_other_files()
            if not resume:
                self.begin()
        except BaseException:
            self._release()
            raise

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def transcripts_path(self) -> Path:
        return self.path / "transcripts"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def trace_path(self) -> Path:
        return self.path / "trace.pftrace"

    @property
    def health_path(self) -> Path:
        return self.path / "health.jsonl"

    @property
    def evaluations_path(self) -> Path:
        return self.path / "eval.json"

    def begin(self) -> None:
        """The run goes on from here: its status says so."""
        self._begun = True
        self._write_status("running")

    def write_config(self, yaml: str) -> None:
        """Keep the resolved configuration beside the results."""
        write_atomically(self.path / "config.yaml", yaml)

    def complete(self) -> None:
        """The run did what it was asked to. Releases the folder."""
        self._finish("complete", exit_code=0)

    def fail(self, *, exit_code: int, cause: str) -> None:
        """The run ended early. Releases the folder."""
        self._finish("failed", exit_code=exit_code, cause=cause)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.complete()
        elif isinstance(error, SystemExit) and error.code in (None, 0):
            self.complete()
        else:
            self.fail(exit_code=_exit_code(error), cause="; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    def _finish(self, state: State, **fields: Any) -> None:
        if self._lock < 0:
            return  # the first verdict stands
        try:
            if self._begun:
                self._write_status(state, **fields)
        except OSError as error:  # a full disk, say: what ended the run is the thing to report
            print(f"burnish: {self.path / 'status.json'} can't be written: {error.strerror}", file=sys.stderr)
        finally:
            self._release()

    def _refuse_other_files(self) -> None:
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name != "lock")
        if others:
            some = ", ".join(others[:3])
            raise RunFolderError(f"{self.path} holds another run's files ({some}); choose another run.name, or go on with it: --resume")

    def _write_status(self, state: State, **fields: Any) -> None:
        status = {"state": state, **fields, "pid": os.getpid(), "host": socket.gethostname(), "time": _now()}
        write_atomically(self.path / "status.json", json.dumps(status, indent=1) + "\n")

    def _take_lock(self) -> None:
        owner = os.pread(self._lock, 4096, 0).decode(errors="replace").strip()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise RunFolderError(f"can't lock {self.path / 'lock'}: {error.strerror}") from error
            raise RunFolderError(f"{self.path} is in use by {owner or 'another process'}; wait for it or choose another run.name") from None
        host = f"host {socket.gethostname()}"
        if owner and not owner.endswith(host):
            raise RunFolderError(
                f"{self.path} is locked by {owner}, which can't be seen from here; if that has ended, delete its file `lock`"
            )
        if owner:
            print(f"burnish: {self.path} was left locked by {owner}, which has ended: taking it over", file=sys.stderr)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"pid {os.getpid()} on {host}\n".encode(), 0)

    def _release(self) -> None:
        os.ftruncate(self._lock, 0)  # empty means released in order; the file stays, as removing a locked file is a race
        os.close(self._lock)
        self._lock = -1


def read_status(folder: str | Path) -> dict[str, Any]:
    """The status of the run in `folder`; a run that was killed reads as failed, though nobody was left to write so."""
    path = Path(folder)
    status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    if status["state"] == "running" and status["host"] == socket.gethostname() and not _locked(path / "lock"):
        return status | {"state": "failed", "cause": f"process {status['pid']} was killed"}
    return status


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, secrets hidden: readers, and a crash, see the old or the new content, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(scrub(text))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _resolve(root: Path, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise RunFolderError(
            f"run.name {name[:120]!r} must be at most 100 letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    path = root / name
    if path.resolve() != root.resolve() / name:
        raise RunFolderError(f"{path} is a link to {path.resolve()}, outside {root.resolve()}; choose another run.name")
    return path


def _locked(lock: Path) -> bool:
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, BurnishError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
