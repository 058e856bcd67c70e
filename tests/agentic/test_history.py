"""Templates that write earlier turns in another way than they were sampled: the episode forks, and every sampled id is trained once.

B055, B059: never stitched by length, nothing lost, nothing trained twice.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from burnish.agentic.agents import Action, ModelAgent
from burnish.text.chat import ChatTemplate
from burnish.text.codec import Codec
from burnish.types import Message, Trajectory
from tests.agentic.episodes import END, Talk, context, play, script

DROPS_THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set earlier = message.role == 'assistant' and loop.index0 < ns.last %}
{{- message.content.split('</think>')[-1] if earlier else message.content }}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def forgetful(codec: Codec) -> Codec:
    """Earlier assistant turns are shown without their <think> part, as Qwen3's template does."""
    return replace(codec, template=ChatTemplate({"default": DROPS_THINKING}, codec.tokenizer))


def rows(got: Trajectory) -> list[tuple[list[int], list[bool]]]:
    """Each row of an episode as the model saw it: ids, and which were sampled."""
    borders = [got.prompt_length, *got.forks, len(got.ids)]
    prompt, unsampled = got.ids[: got.prompt_length].tolist(), [False] * got.prompt_length
    return [
        ([*prompt, *got.ids[a:b].tolist()], [*unsampled, *got.sampled[a:b].tolist()]) for a, b in zip(borders, borders[1:], strict=False)
    ]


def texts(codec: Codec, got: Trajectory) -> list[str]:
    return [codec.tokenizer.decode(ids, skip_special=False) for ids, _ in rows(got)]


def test_b059_a_template_that_forgets_thoughts_forks_and_each_sampled_id_is_trained_once(codec: Codec) -> None:
    turns = ("<think>hm</think>one", "<think>so</think>two")
    got = play(context(script(codec, *turns), forgetful(codec)), Talk(says=("first", "second")))
    assert got.ids[got.sampled].tolist() == [index for turn in turns for index in [*codec.tokenizer.encode(turn), END]]
    opening = "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n"
    assert texts(codec, got) == [
        f"{opening}<think>hm</think>one<|im_end|>",
        f"{opening}one<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n<think>so</think>two<|im_end|>",
    ]
    assert got.ids[: got.prompt_length].tolist() == codec.tokenizer.encode(opening, parse_special=True)
    for step, (ids, sampled) in zip(got.steps, rows(got), strict=True):
        shown = len(step.prompt_ids)
        assert ids[:shown] == step.prompt_ids.tolist() and sampled == [False] * shown + [True] * (len(ids) - shown)


def test_without_thoughts_the_same_template_keeps_one_row(codec: Codec) -> None:
    got = play(context(script(codec, "one", "two"), forgetful(codec)), Talk(says=("first", "second")))
    assert got.forks == () and texts(codec, got)[0].endswith(
        "one<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )


def test_tool_results_dont_end_the_reasoning_so_nothing_forks_before_the_user_speaks(codec: Codec) -> None:
    class Tools(Talk):
        def _step_impl(self, action: Action):  # type: ignore[no-untyped-def]
            result = super()._step_impl(action)
            role = "user" if self.num_steps == 2 else "tool"
            return replace(result, observation=[{"role": role, "content": str(result.observation)}])

    turns = ("<think>a</think>x", "<think>b</think>y", "<think>c</think>z")
    got = play(context(script(codec, *turns), forgetful(codec)), Tools(says=("q", "result", "next")))
    assert [text.count("<think>") for text in texts(codec, got)] == [2, 1]
    assert got.num_sampled == sum(len(step.completion.ids) for step in got.steps)


def test_an_agent_that_changes_its_history_forks_too(codec: Codec) -> None:
    class Forgets(ModelAgent):
        """Keeps the last exchange only."""

        def update_from_env(self, observation: str | Sequence[Message], *, info=None) -> list[Message]:  # type: ignore[no-untyped-def]
            self.messages = self.messages[-1:]
            return super().update_from_env(observation, info=info)

    got = play(context(script(codec, "a", "b", "c"), codec), Talk(says=("one", "two", "three")), agent=Forgets())
    assert texts(codec, got)[2].startswith("<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nthree")
    assert got.ids[got.sampled].tolist() == [i for text in "abc" for i in [*codec.tokenizer.encode(text), END]]
    # What all rows share is less than the prompt here: <|im_start|> alone.
    assert (got.prompt_length, len(got.forks)) == (1, 2) and not got.sampled[list(got.forks)].any()


def test_a_row_in_which_nothing_was_sampled_any_more_is_left_out(codec: Codec) -> None:
    got = play(context(script(codec, "<think>a</think>x", "y"), forgetful(codec), limits={"max_tokens": 18}), Talk(says=("q", "r")))
    assert got.status == "truncated" and got.forks == () and np.flatnonzero(got.sampled)[-1] == len(got.ids) - 1


def test_an_agent_that_remembers_nothing_has_a_row_for_each_turn(codec: Codec) -> None:
    """Also where the observation is the same again and the reply is empty, so that the text would go on by chance."""
    got = play(
        context(script(codec, "one", "", "three"), codec), Talk(says=("look", "look", "look")), agent=ModelAgent("Play.", remembers=0)
    )
    opening = "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n"
    assert texts(codec, got) == [f"{opening}{said}<|im_end|>" for said in ("one", "", "three")]
    assert got.ids[got.sampled].tolist() == [*codec.tokenizer.encode("one"), END, END, *codec.tokenizer.encode("three"), END]
    assert [message["content"] for message in got.messages] == ["Play.", "look", "one", "look", "", "look", "three"], (
        "rewards see all of it"
    )


def test_an_agent_that_remembers_one_turn_shows_it(codec: Codec) -> None:
    got = play(context(script(codec, "a", "b", "c"), codec), Talk(says=("1", "2", "3")), agent=ModelAgent(remembers=1))
    asked = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\n2<|im_end|>\n"
    assert texts(codec, got)[0].startswith(asked) and len(got.forks) == 1
    assert texts(codec, got)[1].startswith("<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n3")
