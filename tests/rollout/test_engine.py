"""Plain code that waits for an engine."""

import asyncio

import pytest

from burnish.rollout.engine import wait_for


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"no {number}")
    return 2 * number


def test_plain_code_may_wait_wherever_it_is_called() -> None:
    """In a notebook every cell runs inside a loop, where `asyncio.run` refuses to."""

    async def cell() -> int:
        with pytest.raises(ValueError, match="no -1"):
            wait_for(doubled(-1))
        return wait_for(doubled(21))

    assert wait_for(doubled(21)) == asyncio.run(cell()) == 42
