"""From what a user calls a data set to what the learner draws from, checked before any weights are loaded.

Owns the length policy's place in a run and the early errors: nothing to draw, less than a batch, all too long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from burnish.agentic.agents import ConversationAgentBase
from burnish.agentic.trajectory import Template, opening
from burnish.config.errors import UserError
from burnish.config.schema import TrainingConfig
from burnish.data.length import CountTokens, OverlongPolicy, limit_prompts
from burnish.data.source import Source, from_rows, require_at_least
from burnish.data.stream import PromptStream
from burnish.types import Prompt

log = logging.getLogger(__name__)


def token_counter(template: Template, make_agent: Callable[[], ConversationAgentBase]) -> CountTokens:
    """How many tokens a prompt's messages take once the agent has put its system prompt and its tools before them."""

    def count(messages: Sequence[Any]) -> int:
        agent = make_agent()
        agent.reset()
        agent.update_from_env(list(messages))
        return len(opening(agent, template).ids)

    return count


def training_stream(
    train_ds: PromptStream | Iterable[Any],
    *,
    count_tokens: CountTokens | None,
    max_tokens: int,
    seed: int,
    batch_size: int,
    policy: OverlongPolicy,
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    epochs: int | None = None,
) -> PromptStream:
    """A stream over rows or `Source`s, too long prompts dealt with. A `PromptStream` is taken as it is, its size checked.

    count_tokens None: prompts aren't known before an environment speaks, so they can't be measured here.
    """
    if isinstance(train_ds, PromptStream):
        stream = train_ds
    else:
        sources = [limited(source, count_tokens, max_tokens, policy) for source in _sources(train_ds, "train")]
        stream = PromptStream(sources, seed=seed, weights=weights, shuffle=shuffle, epochs=epochs)
    if stream.num_rows is not None:
        require_at_least(stream.num_rows, batch_size, name="the training data")
    return stream


def held_out_prompts(eval_ds: Iterable[Any], *, count_tokens: CountTokens | None, max_tokens: int, policy: OverlongPolicy) -> list[Prompt]:
    """Every prompt of the evaluation data, in order."""
    return [prompt for source in _sources(eval_ds, "eval") for prompt in limited(source, count_tokens, max_tokens, policy).prompts]


def require_held_out(training: TrainingConfig, held_out: Sequence[Prompt] | None) -> None:
    """Refuse to be asked for evaluations with nothing to evaluate on."""
    if (training.eval_every is not None or training.compare) and not held_out:
        raise UserError("training.eval_every and training.compare need held-out prompts: give eval_ds (data.eval)")


def limited(source: Source, count_tokens: CountTokens | None, max_tokens: int, policy: OverlongPolicy) -> Source:
    """The source without its too long prompts; how many there were is logged."""
    if count_tokens is None:
        return source
    kept, report = limit_prompts(source, count_tokens=count_tokens, max_tokens=max_tokens, policy=policy)
    if report.dropped or report.cut:
        log.warning("%s: %s", source.name, report)
    return kept


def _sources(data: Iterable[Any], name: str) -> list[Source]:
    if isinstance(data, Sequence) and data and all(isinstance(item, Source) for item in data):
        return list(data)
    if isinstance(data, Sequence) and data and all(isinstance(item, Prompt) for item in data):
        return [Source(name, data)]
    return [from_rows(data, name=name)]


__all__ = ["held_out_prompts", "limited", "require_held_out", "token_counter", "training_stream"]
