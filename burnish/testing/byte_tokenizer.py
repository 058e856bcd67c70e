"""Tokenizer folders of a few kB for tiny models: every byte one id, or a small alphabet.

Owns what tests and toy runs need in place of a real vocabulary: tokenizer.json, tokenizer_config.json with a chat template, and
generation_config.json, as `text.tokenizer` and `text.chat` (and transformers) read them. No weights, no config.json.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
UNKNOWN = "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
ALPHABET = string.digits + string.ascii_lowercase + " +-*=?.,:\n"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE_TOKEN_ROLES = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_byte_tokenizer(folder: str | Path) -> Path:
    """259 ids: `<|endoftext|>` 0 (pad), `<|im_start|>` 1, `<|im_end|>` 2 (ends a turn), then the bytes; ChatML. Any text round-trips."""
    return _write(Path(folder), specials=(PAD, TURN, END), symbols=sorted(pre_tokenizers.ByteLevel.alphabet()), template=CHATML)


def make_tiny_tokenizer(folder: str | Path, alphabet: str = ALPHABET) -> Path:
    """One id a character of `alphabet` (ASCII; by default 53 ids in all); any other byte becomes `<|unknown|>`.

    Specials first: `<|endoftext|>` 0 (pad), `<|im_end|>` 1 (ends a turn), `<|unknown|>` 2, then one id a role, so that a template costs two
    ids a message: `<|user|>12+7=<|im_end|><|assistant|>`.
    """
    if not alphabet.isascii():
        raise ValueError(f"the alphabet of a tiny tokenizer is ASCII, one byte a character; got {alphabet!r}")
    specials = (PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [byte_level.pre_tokenize_str(character)[0][0] for character in dict.fromkeys(alphabet)]
    return _write(Path(folder), specials=specials, symbols=symbols, template=ONE_TOKEN_ROLES)


def _write(folder: Path, *, specials: tuple[str, ...], symbols: Sequence[str], template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {text: index for index, text in enumerate((*specials, *symbols))}
    unknown = UNKNOWN if UNKNOWN in specials else None
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": vocab[END], "pad_token_id": vocab[PAD]})
    return folder


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
