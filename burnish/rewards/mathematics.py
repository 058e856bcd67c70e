r"""Answers as mathematics: equal if a computer algebra says so, `\frac12` = 0.5 = `1/2`, {1,2} = {2,1}. Needs the extra `math`.

Owns the use of math-verify, whose time limits are signals and refuse threads, and whose algebra may hang nevertheless: so the manager calls
this in worker processes, which are killed, and where a group takes too long each sample is asked by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from burnish.config.errors import UserError
from burnish.rewards.answers import last_boxed


def math(completions: Sequence[str], answer: Sequence[Any], *, need_box: bool = True, seconds: int = 3) -> list[float]:
    r"""1.0 where the last `\boxed{...}` equals the answer, or one of a list of answers, as mathematics.

    need_box False also reads a formula or number off a completion without a box. seconds: for reading and for comparing one.
    """
    verify, parse = _math_verify()
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "the reward `math` must run in a worker process, and this is a thread: give the RewardManager a runner, as a run does"
        )
    rewards = []
    for text, golds in zip(completions, answer, strict=True):
        boxed = last_boxed(text)
        said = rf"\boxed{{{boxed}}}" if boxed is not None else None if need_box else text
        accepted = golds if isinstance(golds, list | tuple) else [golds]
        found = [] if said is None else parse(said, parsing_timeout=seconds)
        wanted = [parse(rf"\boxed{{{last_boxed(str(gold)) or gold}}}", parsing_timeout=seconds) for gold in accepted]
        if not all(wanted):
            raise ValueError(f"the gold answer {golds!r:.80} can't be read as mathematics")
        rewards.append(float(any(verify(gold, found, timeout_seconds=seconds) for gold in wanted)) if found else 0.0)
    return rewards


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify  # two seconds
    except ImportError as error:
        raise UserError(f'the reward `math` needs the extra `math`: pip install "burnish[math]" ({error})') from error
    return verify, parse


__all__ = ["math"]
