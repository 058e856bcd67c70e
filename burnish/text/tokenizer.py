"""Text ↔ ids, out of a Hugging Face folder's tokenizer.json.

Owns encoding, decoding and which ids are BOS, EOS and padding. Adds no BOS or EOS to anything: a template writes its own (`chat.py`), so
none can be doubled. Called by `chat.py`, data filters, engines and agents, from any number of threads: nothing is changed after loading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from burnish.config.errors import MissingFile, UserError


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary and its special ids; made by `Tokenizer.load`.

    bos_id, eos_id: None where there is none. pad_id: always an id with an embedding. vocab_size: ids that the tokenizer knows.
    embedding_size: ids that the model knows, often more. named_tokens: `bos_token`, `eos_token`, … → its text, as templates read them.
    special_tokens: the texts that become one id only where special tokens are parsed, longest first. (Added tokens that aren't marked
    special, such as Qwen's `<think>`, are ids in any text.)
    """

    bos_id: int | None
    eos_id: int | None
    pad_id: int
    vocab_size: int
    embedding_size: int
    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...] = field(repr=False)
    _special_pattern: re.Pattern[str] = field(repr=False)
    # One backend for either way of reading special tokens: the switch between them is a setting of the whole object, unsafe with threads.
    _markup: tokenizers.Tokenizer = field(repr=False)
    _literal: tokenizers.Tokenizer = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder.

        BOS, EOS and padding are what tokenizer_config.json (else special_tokens_map.json) names. EOS without a name is the first
        `eos_token_id` of generation_config.json (else config.json). Padding without a name is their `pad_token_id`, else EOS, else id 0:
        any id with an embedding serves, since masks come from lengths and stop reasons, never from `ids != pad`.
        Raises `MissingFile` without tokenizer.json, ValueError for a name or an id that can't be right.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise MissingFile(f"no {path}; a folder without it can be converted by transformers: AutoTokenizer, then save_pretrained")
        markup, literal = (_backend(path) for _ in range(2))
        literal.encode_special_tokens = True
        vocab_size = 1 + max(markup.get_vocab(with_added_tokens=True).values())
        embedding_size = read_json(folder / "config.json").get("vocab_size", vocab_size)
        named = _named_tokens(folder)
        ids = {
            role: _named_id(markup, role, named[role], embedding_size) for role in ("bos_token", "eos_token", "pad_token") if role in named
        }
        eos_id = ids.get("eos_token", next(iter(configured_ids(folder, "eos_token_id", embedding_size)), None))
        pad_ids = () if "pad_token" in ids else configured_ids(folder, "pad_token_id", embedding_size)
        if len(pad_ids) > 1:
            raise UserError(f"pad_token_id in {folder} is {list(pad_ids)}, expected one id; name a pad_token in tokenizer_config.json")
        special = sorted(
            (token for token in markup.get_added_tokens_decoder().values() if token.special), key=lambda token: -len(token.content)
        )
        return cls(
            bos_id=ids.get("bos_token"),
            eos_id=eos_id,
            pad_id=ids.get("pad_token", next(iter(pad_ids), 0 if eos_id is None else eos_id)),
            vocab_size=vocab_size,
            embedding_size=embedding_size,
            named_tokens=named,
            special_tokens=tuple(token.content for token in special),
            _special_pattern=re.compile("|".join(_pattern(token) for token in special) or r"(?!)"),
            _markup=markup,
            _literal=literal,
        )

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of `text`. A special token's text stays text, as foreign text must, unless `parse_special`: for rendered templates."""
        backend = self._markup if parse_special else self._literal
        ids = backend.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.embedding_size:
            raise UserError(f"{backend.id_to_token(max(ids))!r} has id {max(ids)}, but the model embeds only {self.embedding_size} ids")
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens unless asked for."""
        return self._markup.decode([int(index) for index in ids], skip_special_tokens=skip_special)

    def differences(self, other: Tokenizer) -> list[str]:
        """Tokens that have another id in `other`, or none, by their id here: a model of `other` would misread them."""
        theirs = other._markup.get_vocab(with_added_tokens=True)
        mine = sorted(self._markup.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return [token for token, index in mine if theirs.get(token) != index]

    def token_id(self, token: str) -> int | None:
        """The id of one token given as the vocabulary writes it, None if it isn't there."""
        return self._markup.token_to_id(token)

    def split_special(self, text: str) -> Iterator[int | str]:
        """`text` in order as ids of special tokens and the texts between them."""
        start = 0
        for match in self._special_pattern.finditer(text):
            index = self._markup.token_to_id(match[match.lastindex or 0])
            assert index is not None, "the pattern is made of the backend's own tokens"
            if match.start() > start:
                yield text[start : match.start()]
            yield index
            start = match.end()
        if start < len(text):
            yield text[start:]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} isn't valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def configured_ids(folder: Path, key: str, embedding_size: int) -> tuple[int, ...]:
    """An id or a list of ids under `key` of generation_config.json, else of config.json; empty where neither has one."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = read_json(path).get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(index) is int and 0 <= index < embedding_size for index in ids):
            raise UserError(f"{key} in {path} is {value!r}, expected an id from 0 to {embedding_size - 1}; correct it there")
        return tuple(ids)
    return ()


def _backend(path: Path) -> tokenizers.Tokenizer:
    """Some folders store a cut or a padding in tokenizer.json; neither may touch a prompt silently."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token`, `pad_token`, `unk_token`, … → text; a name that is null isn't there."""
    entries = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = {}
    for role, value in entries.items():
        if not role.endswith("_token") or value is None or isinstance(value, bool):  # add_bos_token and its like are switches
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UserError(f"{role} in {folder} is {value!r}, expected one token's text; correct tokenizer_config.json")
        named[role] = text
    return named


def _named_id(backend: tokenizers.Tokenizer, role: str, text: str, embedding_size: int) -> int:
    index = backend.token_to_id(text)
    if index is None or index >= embedding_size:
        known = "tokenizer.json doesn't know it" if index is None else f"its id {index} is beyond the model's {embedding_size} embeddings"
        raise UserError(f"{role} is {text!r}, but {known}; name another one in tokenizer_config.json")
    return index


def _pattern(token: tokenizers.AddedToken) -> str:
    """Matches the token as the backend does: some swallow the white space on a side."""
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    return f"{before}({re.escape(token.content)}){after}"
