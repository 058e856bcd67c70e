"""B059: a template that drops earlier reasoning from the history mustn't drop it from what is trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from burnish.text.codec import Codec
from burnish.types import Message
from tests.agentic.episodes import END, Talk, context, play, script


class DropsThinking:
    """Renders earlier assistant turns without their <think> part, as Qwen3's template does."""

    def __init__(self, codec: Codec) -> None:
        self._template = codec.template

    def encode(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [
            {**m, "content": m["content"].rpartition("</think>")[2]} if m["role"] == "assistant" and i < last_user else m
            for i, m in enumerate(messages)
        ]
        return self._template.encode(shown, add_generation_prompt=add_generation_prompt)


def test_b059_every_sampled_id_is_trained_once_though_the_template_forgets_thoughts(codec: Codec) -> None:
    turns = ("<think>hm</think>one", "<think>so</think>two")
    episode = replace(context(script(codec, *turns), codec), template=DropsThinking(codec))
    got = play(episode, Talk(says=("first", "second")))
    sampled = [index for turn in turns for index in [*codec.tokenizer.encode(turn), END]]
    assert got.ids[got.sampled].tolist() == sampled  # one row, verbatim: the thoughts of turn 1 stay where they were sampled
    assert int(got.sampled.sum()) == sum(len(step.completion.ids) for step in got.steps)
    second = got.steps[1].prompt_ids.tolist()
    assert second == got.ids[: len(second)].tolist()  # turn 2 was sampled after exactly this
