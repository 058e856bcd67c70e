"""Environments of the package `verifiers` (0.4), played through the endpoint as programs. Needs the extra `verifiers`, imported then.

Owns how one of its episodes becomes ours: its configuration is a column of the data, its task a number, its harness asks the model at the
program's address, and its rewards are the program's. Everything else is `programs.py`'s.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping
from typing import Any

from burnish.config.errors import UserError

_KEY = "BURNISH_SESSION_KEY"
"""The variable in which verifiers finds the key."""


def create_dataset(env: Mapping[str, Any], count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of `count` tasks of an environment. env: its configuration as verifiers reads it, e.g. `{taskset: {id: gsm8k-v1}, agent: …}`."""
    return [{"prompt": "", "verifiers": dict(env), "index": index} for index in range(first, first + count)]


def play(base_url: str, api_key: str, verifiers: Mapping[str, Any], index: int) -> dict[str, float | None]:
    """One episode: what its environment rewards, weighted as there. An episode that verifiers calls failed raises."""
    os.environ[_KEY] = api_key
    return asyncio.run(_play(base_url, verifiers, index))


async def _play(base_url: str, config: Mapping[str, Any], index: int) -> dict[str, float | None]:
    try:
        clients, loaders = (importlib.import_module(f"verifiers.v1.{name}") for name in ("clients", "utils.loaders"))
    except ImportError as error:
        raise UserError(f'this needs the extra `verifiers`: pip install "burnish[verifiers]" ({error})') from error
    env = loaders.load_environment(loaders.resolve_env_config(dict(config)))
    (task,) = env.taskset.include(idx=[index])
    client = clients.EvalClientConfig(base_url=base_url, api_key_var=_KEY)
    async with env.serving():
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, clients.ModelContext("policy", client))
    if not episode.ok:
        failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in failed) or "verifiers calls the episode failed")
    rewards = [(name, reward) for trace in episode.traces for name, reward in trace.rewards.items()]
    return {name: None if reward is None else reward.value for name, reward in rewards}


__all__ = ["create_dataset", "play"]
