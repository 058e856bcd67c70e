"""The text side of one model folder: its tokenizer and its chat template. Loads in a fraction of a second, before any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.text.chat import ChatTemplate
from burnish.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Codec:
    """Messages → ids by `template`, ids → text by `tokenizer`."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def load(cls, folder: str | Path, *, template_kwargs: Mapping[str, Any] | None = None) -> Codec:
        """Read tokenizer.json, tokenizer_config.json, generation_config.json and the template of a Hugging Face folder."""
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatTemplate.load(folder, tokenizer, template_kwargs=template_kwargs))
