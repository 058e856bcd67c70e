"""What can go wrong that is no bug: the errors that the command line prints as plain words.

Owns the classes; every room may raise them, `cli/main.py` turns them into an exit code. Nothing here imports anything heavy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burnish.config.secrets import scrub


class BurnishError(Exception):
    """A failure whose message says all that its reader needs. The command line exits with `exit_code`."""

    exit_code = 1


class UserError(BurnishError, ValueError):
    """Something that was asked for can't be done; the message says what was got and what to do."""

    exit_code = 2


class MissingFile(UserError, FileNotFoundError):
    """A file or folder that was named isn't there."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong with a configuration: the key's dotted path ("" for a whole file), what is wrong, where it was written."""

    path: str
    message: str
    source: str

    def __str__(self) -> str:
        key = f"{self.path}: " if self.path else ""
        return f"{key}{self.message} [{self.source}]"


class ConfigError(UserError):
    """All mistakes of a configuration at once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        lines = [scrub(str(mistake)) for mistake in mistakes]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes in the configuration:", *lines]))


class CallError(Exception):
    """What somebody else's code did wrong, in a line: an environment's, a tool's, a reward function's. `trace` is its traceback."""

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.trace = trace


class CallLost(CallError):
    """The process that somebody else's code ran in has ended; what it would have done nobody knows."""


class WorkersKeepDying(BurnishError):
    """More worker processes have died by themselves than a run may lose."""


class CallTimeout(Exception):
    """Somebody else's code didn't end within its limit."""


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name nearest to `name`, else nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{nearest[0]}`?" if nearest else ""
