"""Scores complete groups: calls the reward functions, checks what they return, turns their failures into statuses.

Owns the calling convention and the weighted sum. Knows no particular reward (`answers.py`, `shape.py`) and no advantages: what a missing
reward means for a baseline is decided in `rl.advantages`. The orchestrator calls `score` once for each group.

A reward function is `fn(prompts, completions, **columns) -> list[float | None]`, plain or async. It gets by keyword what it names:
`prompts` (text of the last user message), `completions` (the last assistant text), `conversations` (whole message lists), `trajectories`,
and any column of the data row; with `**columns`, every column. Each value is a list with one item for each completion. None means "doesn't
apply here" and is missing, never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import numbers
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

import numpy as np

from burnish import faults
from burnish.config.errors import CallError, CallTimeout, UserError
from burnish.types import Group, Message, Prompt, Status, Trajectory

log = logging.getLogger(__name__)

GIVEN = ("prompts", "completions", "conversations", "trajectories")
"""What burnish fills in itself; a data column of such a name is hidden by it."""

ENVIRONMENT = "environment"
"""The entry of `Trajectory.rewards` that holds what the environment gave, summed over its steps."""


class RewardError(UserError):
    """A reward function can't be called as it is, or returned what is no list of rewards."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function in the weighted sum. `timeout_s` is for one group; None waits for ever."""

    name: str
    fn: Callable[..., Any]
    weight: float = 1.0
    timeout_s: float | None = 60.0

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise RewardError(f"reward {self.name!r} must be a function, got {self.fn!r} ({type(self.fn).__name__})")
        if not _finite(self.weight):
            raise RewardError(f"reward {self.name!r}: the weight must be a finite number, got {self.weight!r}")
        if self.timeout_s is not None and (isinstance(self.timeout_s, bool) or not (_finite(self.timeout_s) and self.timeout_s > 0)):
            raise RewardError(f"reward {self.name!r}: timeout_s must be finite and > 0, or None for no limit; got {self.timeout_s!r}")

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> RewardSpec:
        """The function with weight 1, under its own name; options bound by `functools.partial` don't change the name."""
        named = fn
        while isinstance(named, functools.partial):
            named = named.func
        has_name = isinstance(named, FunctionType | MethodType | BuiltinFunctionType | type)
        return cls(named.__name__ if has_name else type(named).__name__, fn)


class Runner(Protocol):
    """Calls functions that may fail or hang (`agentic.calls.Calls`); raises `CallError` and `CallTimeout`."""

    def check(self, fn: Callable[..., Any], name: str) -> None: ...

    def killable(self, fn: Callable[..., Any], name: str) -> bool: ...

    async def __call__(
        self,
        fn: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None,
        name: str,
        fault: tuple[str, Mapping[str, Any]] | None = None,
    ) -> Any: ...


class RewardManager:
    """Fills in the rewards of groups.

    A trajectory's reward is the weighted sum of what applies to it: each function's value that isn't None, and with weight 1 what the
    environment gave. If nothing applies it is None. Where a function raised or took too long, the group's trajectories become
    `grader_error` with the reason and have no reward. A return that isn't one finite number or None for each completion is a mistake in the
    function, and raises `RewardError`; a `UserError` of one that runs here (no isolation for programs, an extra that isn't installed) is
    raised as well, as no episode could do better.

    runner: what calls them; a run's keeps plain functions in worker processes. A group that takes too long there is asked again sample by
    sample, so that only the sample at fault is lost. Without a runner, and where they are burnish's own, plain functions run on threads,
    which can't be killed: one that overruns its limit goes on in the background until it returns, and is counted in `abandoned`. Of two
    functions of one name the second is called `name_2`.
    """

    def __init__(self, specs: Sequence[RewardSpec], *, runner: Runner | None = None) -> None:
        self.specs = _with_distinct_names(specs)
        self.abandoned = 0
        self._runner = runner
        for spec in self.specs:
            if runner is not None and spec.timeout_s is not None and not _is_own(spec.fn):
                runner.check(spec.fn, f"reward {spec.name}")
        self._parameters = {spec.name: _parameters(spec) for spec in self.specs}

    def check(self, prompt: Prompt) -> None:
        """Refuse functions that need a column which the prompt's row doesn't have; to be called before anything is generated."""
        for spec in self.specs:
            self._arguments(spec, prompt, [])

    async def score(self, group: Group) -> None:
        """Fill `rewards`, their weights, `reward` and, where grading failed, `status` and `error`, of episodes that ended well."""
        graded = [t for t in group.trajectories if t.status in (Status.OK, Status.TRUNCATED)]
        if not graded:
            return
        outcomes = await asyncio.gather(*(self._call(spec, group, graded) for spec in self.specs))
        for index, trajectory in enumerate(graded):
            mine = [got[index] for got in outcomes]
            values: dict[str, float | None] = {
                spec.name: None if isinstance(got, _Failure) else got for spec, got in zip(self.specs, mine, strict=True)
            }
            weights = {spec.name: float(spec.weight) for spec in self.specs}
            steps = [step.reward for step in trajectory.steps if step.reward is not None]
            if steps:
                values[ENVIRONMENT], weights[ENVIRONMENT] = math.fsum(steps), 1.0
            applying = [weights[name] * value for name, value in values.items() if value is not None]
            trajectory.rewards, trajectory.reward_weights = values, weights
            trajectory.reward = math.fsum(applying) if applying else None
            failures = [got.reason for got in mine if isinstance(got, _Failure)]
            if failures:
                trajectory.status, trajectory.reward, trajectory.error = Status.GRADER_ERROR, None, "; ".join(failures)

    async def _call(self, spec: RewardSpec, group: Group, graded: Sequence[Trajectory]) -> Sequence[float | None | _Failure]:
        """One function on one group: for each trajectory its checked value, or why there is none."""
        outcome = await self._try(spec, group, graded)
        if not isinstance(outcome, _Failure):
            return outcome
        killable = self._runner is not None and not _is_own(spec.fn) and self._runner.killable(spec.fn, f"reward {spec.name}")
        if outcome.late and len(graded) > 1 and killable:
            log.warning("reward %s of draw %d in step %d took too long; each of its samples is graded alone", spec.name, *group.id[::-1])
            alone = await asyncio.gather(*(self._try(spec, group, [trajectory]) for trajectory in graded))
            return [got if isinstance(got, _Failure) else got[0] for got in alone]
        return [outcome] * len(graded)

    async def _try(self, spec: RewardSpec, group: Group, graded: Sequence[Trajectory]) -> list[float | None] | _Failure:
        """One call: the checked values, or why there are none."""
        if self._runner is None or _is_own(spec.fn):
            returned = await self._beside(spec, group, graded)
        else:
            arguments = self._arguments(spec, group.prompt, graded)
            alone = {"sample": graded[0].sample} if len(graded) == 1 else {}
            fault = ("reward", {"id": group.id[1], "step": group.id[0], "reward": spec.name, **alone})
            try:
                returned = await self._runner(spec.fn, arguments, timeout_s=spec.timeout_s, name=f"reward {spec.name}", fault=fault)
            except CallTimeout:
                returned = _Failure.too_late(spec)
            except CallError as error:
                returned = _Failure(f"reward {spec.name}: {error}")
        return returned if isinstance(returned, _Failure) else _checked(returned, spec.name, len(graded))

    async def _beside(self, spec: RewardSpec, group: Group, graded: Sequence[Trajectory]) -> Any:
        """What the function returns, or a `_Failure`; without a runner."""
        arguments = self._arguments(spec, group.prompt, graded)

        def start() -> Any:
            faults.point("reward", id=group.id[1], step=group.id[0], reward=spec.name)
            return spec.fn(**arguments)

        asynchronous = _is_async(spec.fn)
        try:
            returned = await asyncio.wait_for(_on_loop(start, spec) if asynchronous else _on_thread(start, spec), spec.timeout_s)
            if isinstance(returned, _Failure) and returned.mistake is not None:
                raise returned.mistake
            return returned
        except TimeoutError:
            self.abandoned += not asynchronous
            return _Failure.too_late(spec)

    def _arguments(self, spec: RewardSpec, prompt: Prompt, graded: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """What the function names, one item for each graded trajectory. The lists are new: a function may do with them what it likes."""
        given: dict[str, Callable[[], list[Any]]] = {
            "prompts": lambda: [_question(prompt.messages)] * len(graded),
            "completions": lambda: [t.final_text for t in graded],
            "conversations": lambda: [_conversation(prompt, t) for t in graded],
            "trajectories": lambda: list(graded),
        }
        columns = {name: value for name, value in prompt.meta.items() if name not in GIVEN}
        parameters = self._parameters[spec.name]
        missing = [name for name, required in parameters.named.items() if required and name not in given and name not in columns]
        if missing:
            there = ", ".join(sorted(columns)) or "none"
            raise RewardError(f"reward {spec.name} needs {', '.join(missing)}, which {prompt.id} has not; its columns are: {there}")
        arguments = {name: make() for name, make in given.items() if name in parameters.named}
        if parameters.rest:
            arguments |= {name: given[name]() for name in ("prompts", "completions")}
        wanted = columns if parameters.rest else columns.keys() & parameters.named.keys()
        return arguments | {name: [columns[name]] * len(graded) for name in wanted if name not in parameters.bound}


async def _on_loop(start: Callable[[], Any], spec: RewardSpec) -> Any:
    """What the coroutine returns, or a `_Failure`. Caught in here: a `SystemExit` that left the task would end the loop."""
    try:
        return await start()
    except (Exception, SystemExit) as error:
        return _Failure.of(error, spec)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return _Failure.of(error, spec)  # something that it awaited was cancelled, not the run


def _on_thread(start: Callable[[], Any], spec: RewardSpec) -> asyncio.Future[Any]:
    """What `start` returns, or a `_Failure`; on a thread of its own, since a pool waits for a hung one when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            outcome = start()
        except BaseException as error:
            outcome = _Failure.of(error, spec)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(outcome))

    threading.Thread(target=work, name=f"reward {spec.name}", daemon=True).start()
    return done


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    late: bool = False
    mistake: UserError | None = None
    """What the run asked for and can't have, here or for any other episode: no episode's data."""

    @classmethod
    def too_late(cls, spec: RewardSpec) -> _Failure:
        return cls(f"reward {spec.name}: not done within {spec.timeout_s} s", late=True)

    @classmethod
    def of(cls, error: BaseException, spec: RewardSpec) -> _Failure:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        return cls(f"reward {spec.name}: {type(error).__name__}: {error}{where}", mistake=error if isinstance(error, UserError) else None)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters that a function takes by keyword (name -> whether it must be given), those bound already, whether it takes the rest."""

    named: Mapping[str, bool]
    bound: frozenset[str]
    rest: bool


def _parameters(spec: RewardSpec) -> _Parameters:
    try:
        parameters = inspect.signature(spec.fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.name!r}: its parameters can't be read ({error}); wrap it in a Python function") from error
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise RewardError(f"reward {spec.name!r} must take its arguments by keyword; {', '.join(positional)} can't be")
    bound = frozenset(spec.fn.keywords) if isinstance(spec.fn, functools.partial) else frozenset()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return _Parameters(named, bound, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _checked(returned: Any, name: str, count: int) -> list[float | None]:
    """One finite float or None for each completion; numbers of numpy and booleans are numbers."""
    expected = f"reward {name} must return {count} rewards, each a finite number or None"
    is_list = isinstance(returned, Sequence) or (isinstance(returned, np.ndarray) and returned.ndim > 0)
    if not is_list or isinstance(returned, str | bytes):
        raise RewardError(f"{expected}; got {returned!r:.80} ({type(returned).__name__})")
    values = list(returned)
    if len(values) != count:
        raise RewardError(f"{expected}; got {len(values)}: {values!r:.80}")
    for index, value in enumerate(values):
        if value is not None and not _finite(value):
            raise RewardError(f"{expected}; number {index} is {value!r:.80} ({type(value).__name__}). For no reward return None")
    return [None if value is None else float(value) for value in values]


def _finite(value: object) -> bool:
    try:
        return isinstance(value, np.bool_) or (isinstance(value, numbers.Real) and math.isfinite(value))
    except OverflowError:  # an integer beyond every float
        return False


def _is_own(fn: Callable[..., Any]) -> bool:
    """Whether a function is burnish's, which end: a process for them would cost a start and gain nothing. Not so of a computer algebra."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return isinstance(fn, FunctionType) and fn.__module__.startswith("burnish.") and fn.__module__ != "burnish.rewards.mathematics"


def _is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _with_distinct_names(specs: Sequence[RewardSpec]) -> tuple[RewardSpec, ...]:
    """New specs; of several with one name, the later ones are numbered."""
    distinct: dict[str, RewardSpec] = {}
    for spec in specs:
        name, count = spec.name, 1
        while name in distinct or name == ENVIRONMENT:
            count += 1
            name = f"{spec.name}_{count}"
        distinct[name] = replace(spec, name=name)
    return tuple(distinct.values())


def _question(messages: Sequence[Message]) -> str:
    return next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")


def _conversation(prompt: Prompt, trajectory: Trajectory) -> list[Message]:
    if trajectory.messages:
        return list(trajectory.messages)
    return [*prompt.messages, Message(role="assistant", content=trajectory.final_text)]
