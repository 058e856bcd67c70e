"""Seeded fault injection: named points in the library at which a test, or a soak, can make things go wrong.

Owns the points' grammar and what the actions do; which points exist is said by the calls of `point`. Off unless `BURNISH_FAULTS` is set
(read once, at import) or a test enters `armed(...)`; then a point costs one comparison.

Grammar: rules separated by commas, each `point@key=value@key=value:action`; conditions are optional and must all hold.

    BURNISH_FAULTS="save.after_arrays@step=5:kill,env.step@p=.1:raise,reward@id=3:hang,sync.skip@version=2:flag"

A key is one of the ids that the point is called with (compared as text), or `p`, a probability. Whether `p` strikes is a function of
`BURNISH_FAULTS_SEED`, the rule, the ids, and how often that rule has met those ids: never of arrival order or time.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

ACTIONS = ("raise", "kill", "hang", "flag")


class InjectedFault(RuntimeError):
    """What the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One parsed rule: strike at `point` when every condition holds, with probability `p`."""

    text: str
    point: str
    conditions: tuple[tuple[str, str], ...]
    p: float
    action: str


_rules: tuple[Rule, ...] = ()
_seed = 0
_lock = threading.Lock()
_meetings: collections.Counter[tuple[str, str]] = collections.Counter()
_fired: collections.Counter[str] = collections.Counter()


def point(name: str, **ids: object) -> bool:
    """Strike here if a rule says so: raise `InjectedFault`, kill this process, or hang this thread.

    Returns True when a rule with the action `flag` struck: the caller then does the wrong thing that the point is named after.
    """
    if not _rules:
        return False
    flagged = False
    for rule in _rules:
        if rule.point == name and _strikes(rule, ids):
            _log(f"{rule.action} at {name} {_identity(ids)}", name)
            flagged = flagged or rule.action == "flag"
            _act(rule, ids)
    return flagged


def fired() -> dict[str, int]:
    """How often each point has struck in this process, to compare with what the run reported."""
    with _lock:
        return dict(_fired)


@contextlib.contextmanager
def armed(spec: str, *, seed: int = 0) -> Iterator[None]:
    """Use these rules, instead of the environment's, inside the block; counts start at zero."""
    global _rules, _seed
    saved = _rules, _seed
    _rules, _seed = parse(spec), seed
    with _lock:
        _meetings.clear()
        _fired.clear()
    try:
        yield
    finally:
        _rules, _seed = saved


def parse(spec: str) -> tuple[Rule, ...]:
    """The rules of a specification; ValueError names the rule that can't be read."""
    return tuple(_parse_rule(text) for text in (part.strip() for part in spec.split(",")) if text)


def _parse_rule(text: str) -> Rule:
    target, colon, action = text.rpartition(":")
    name, *pairs = target.split("@")
    if not colon or not name or action not in ACTIONS:
        raise ValueError(f"fault rule {text!r} must read point@key=value:action with an action of {', '.join(ACTIONS)}")
    conditions, p = [], 1.0
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"fault rule {text!r}: condition {pair!r} must read key=value")
        if key == "p":
            p = _probability(text, value)
        else:
            conditions.append((key, value))
    return Rule(text, name, tuple(conditions), p, action)


def _probability(text: str, value: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 <= (p := float(value)) <= 1.0:
            return p
    raise ValueError(f"fault rule {text!r}: p must be a number between 0 and 1, got {value!r}")


def _strikes(rule: Rule, ids: dict[str, object]) -> bool:
    if any(key not in ids or str(ids[key]) != value for key, value in rule.conditions):
        return False
    if rule.p == 1.0:
        return True
    identity = _identity(ids)
    with _lock:
        meeting = _meetings[rule.text, identity]
        _meetings[rule.text, identity] += 1
    digest = hashlib.blake2b(f"{_seed}\n{rule.text}\n{identity}\n{meeting}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < rule.p


def _identity(ids: dict[str, object]) -> str:
    return " ".join(f"{key}={ids[key]}" for key in sorted(ids))


def _log(what: str, name: str) -> None:
    with _lock:
        _fired[name] += 1
    os.write(2, f"burnish fault: {what.rstrip()}\n".encode())  # unbuffered: the next line may be kill -9


def _act(rule: Rule, ids: dict[str, object]) -> None:
    if rule.action == "raise":
        raise InjectedFault(f"injected at {rule.point} {_identity(ids)}".rstrip())
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while rule.action == "hang":
        time.sleep(3600)


_rules = parse(os.environ.get("BURNISH_FAULTS", ""))
_seed = int(os.environ.get("BURNISH_FAULTS_SEED", "0"))
