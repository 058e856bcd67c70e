"""Any of reasoning-gym's tasks by name, made again from (name, seed, index) wherever it is graded. Needs the extra `envs`.

Half of the questions, chosen by a hash of their text, are held out: training never sees them. See reasoning.yaml.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"[-+]?\d+(?:[./]\d+)*")


@functools.lru_cache
def tasks_of(task: str, seed: int, options: str) -> Any:
    """reasoning-gym's data set, whose entries are made when they are asked for. options: JSON."""
    import reasoning_gym  # takes seconds, so only when it is used

    return reasoning_gym.create_dataset(task, size=100_000, seed=seed, **json.loads(options))


def create_dataset(task: str, count: int, split: str = "train", seed: int = 0, config: Mapping[str, Any] = {}) -> list[dict[str, Any]]:
    """The first `count` different questions of a split ("train" or "eval"). config: options of the task, e.g. `{max_digits: 1}`."""
    options = json.dumps(dict(config), sort_keys=True)
    rows: dict[str, dict[str, Any]] = {}
    for index in range(100 * count):
        question = tasks_of(task, seed, options)[index]["question"]
        if (zlib.crc32(question.encode()) % 2 == 0) == (split == "eval") and question not in rows:
            prompt = f"{question} Reply with only the final answer."
            rows[question] = {"prompt": prompt, "question": question, "task": task, "index": index, "task_seed": seed, "config": options}
        if len(rows) == count:
            break
    return list(rows.values())


def answer_of(completion: str, gold: str) -> str:
    """What stands between <answer> tags; else the last number where the answer is one; else all of it."""
    tagged = re.findall(r"<answer>(.*?)(?:</answer>|\Z)", completion, flags=re.DOTALL)
    numbers = NUMBER.findall(completion) if NUMBER.fullmatch(gold.strip()) else []
    return (tagged or numbers[-1:] or [completion])[-1].strip()


def solved(
    completions: Sequence[str], task: Sequence[str], index: Sequence[int], task_seed: Sequence[int], config: Sequence[str]
) -> list[float]:
    """1.0 where the task's own verifier is wholly content: it gives parts for trying."""
    rewards = []
    for text, name, number, seed, options in zip(completions, task, index, task_seed, config, strict=True):
        tasks = tasks_of(name, seed, options)
        rewards.append(float(tasks.score_answer(answer_of(text, str(tasks[number]["answer"])), tasks[number]) == 1.0))
    return rewards
