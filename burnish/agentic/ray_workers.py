"""Workers on other machines, for clusters that run Ray: the extra `ray`, imported here when a run asks for it.

Owns the actors. Each has one worker process of `workers.py` beside it, so that what runs there is killed with all that it has started, and
never has jax, as on this machine; deadlines, and counts of who died or was killed, are those of `workers.WorkerPool` and `calls.py`.
burnish and the code that is sent must be there in the same versions, and files at the same paths.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.agentic.processes import Search, Zygote, search_here
from burnish.agentic.workers import Answer, ProcessWorker, Worker, WorkerDied
from burnish.config.errors import UserError
from burnish.config.schema import RayConfig

_END_S = 5.0


class Host:
    """What an actor is: a worker process on its machine, and the way to it."""

    def __init__(self, search: Search) -> None:
        self._zygote = Zygote(search)
        self._worker = ProcessWorker(self._zygote)

    async def ask(self, verb: str, blob: bytes) -> tuple[str, Any, bool]:
        """Kind and value of the answer, or "died" and why; whether the worker is spent."""
        try:
            answer = await self._worker.ask(verb, blob)
            return answer.kind, answer.value, self._worker.spent
        except WorkerDied as error:
            return "died", str(error), True

    def end(self) -> None:
        """Kill the process and all that it has started."""
        self._worker.kill()
        self._worker.join(_END_S)
        self._zygote.close()


class RayWorker(Worker):
    """An actor. start: makes one, at once; that it runs is seen by its answers."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._ending: Any = None
        self._lock = threading.Lock()

    async def ask(self, verb: str, blob: bytes) -> Answer:
        try:
            kind, value, spent = await self._actor.ask.remote(verb, blob)
        except self._ray.exceptions.RayError as error:  # its machine or its process is gone
            kind, value, spent = "died", f"its Ray actor is gone: {str(error).strip().splitlines()[0]}", True
        self.spent = self.spent or spent
        if kind == "died":
            self.ended = True
            raise WorkerDied(value)
        return Answer(kind, value)

    def kill(self) -> None:
        """The actor answers whatever its worker does; it ends after that, or with its last handle."""
        self.spent = True
        with self._lock, contextlib.suppress(self._ray.exceptions.RayError):
            self._ending = self._ending or self._actor.end.remote()

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.wait([self._ending], timeout=timeout_s)
            self._ray.kill(self._actor)


def ray_workers(config: RayConfig) -> Callable[[], RayWorker]:
    """What starts a worker on the cluster, which is connected to now. Raises UserError where there is no Ray, or no cluster."""
    handler = signal.getsignal(signal.SIGTERM)
    ray = _library()
    asked = arguments(config)
    if not ray.is_initialized():
        try:
            ray.init(**asked["init"], log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's would end the run without saving it
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"environment.ray.address: there is no Ray cluster at {config.address}: {error}. `ray start --head` begins one"
            ) from error
    actors, search = ray.remote(Host).options(**asked["actor"]), search_here()
    return lambda: RayWorker(ray, actors.remote(search))


def arguments(config: RayConfig) -> dict[str, Any]:
    """What `ray.init` is called with, how each actor is asked for, and how many at most."""
    here = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": here, "JAX_PLATFORMS": "cpu"}
    return {
        "init": {"address": config.address},
        "actor": {"num_cpus": config.cpus, "runtime_env": {"env_vars": environment}, "max_restarts": 0},
        "size": config.workers,
    }


def _library() -> Any:
    try:
        importlib.import_module("ray.exceptions")
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError(f'environment.ray needs the extra `ray`: pip install "burnish[ray]" ({error})') from error


__all__ = ["Host", "RayWorker", "arguments", "ray_workers"]
