"""Locks: special tokens are parsed only on request, nothing is added or cut, padding is a valid id or a clear error, threads agree."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from burnish.testing.byte_tokenizer import make_byte_tokenizer, make_tiny_tokenizer
from burnish.text.tokenizer import Tokenizer

SMALL = Path(__file__).parent / "fixtures" / "smollm2-small"


def folder_with(folder: Path, *, config: dict[str, Any] | None = None, **named: Any) -> Path:
    """The small tokenizer with `named` entries of tokenizer_config.json, a config.json, and no generation_config.json."""
    shutil.copytree(SMALL, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def test_special_tokens_are_parsed_only_on_request() -> None:
    tokenizer = Tokenizer.load(SMALL)
    assert tokenizer.encode("<|im_start|>hi<|im_end|>", parse_special=True) == [1, *tokenizer.encode("hi"), 2]
    literal = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert not {1, 2} & set(literal)
    assert tokenizer.decode(literal) == "<|im_start|>hi<|im_end|>"


def test_special_ids_and_named_tokens_of_a_real_folder() -> None:
    tokenizer = Tokenizer.load(SMALL)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.token_id("<|endoftext|>")) == (1, 2, 2, 0)
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.named_tokens["unk_token"] == "<|endoftext|>"
    assert tokenizer.vocab_size == tokenizer.embedding_size == 17 + 235 + 600, "special tokens, the bytes that SmolLM2 knows, merges"


def test_decoding_drops_special_tokens_and_takes_numpy_ids() -> None:
    tokenizer = Tokenizer.load(SMALL)
    ids = np.array([1, *tokenizer.encode("naïve 日本 12"), 2], np.int32)
    assert tokenizer.decode(ids) == "naïve 日本 12"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>naïve 日本 12<|im_end|>"


def test_a_cut_or_padding_stored_in_the_file_is_not_applied(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("0")) == 1


@pytest.mark.parametrize(
    ("named", "config", "pad_id"),
    [
        ({"pad_token": "<repo_name>", "eos_token": "<|im_end|>"}, {"pad_token_id": -1}, 3),
        ({"pad_token": {"content": "<repo_name>", "special": True}}, {}, 3),
        ({"pad_token": None, "eos_token": "<|im_end|>"}, {"pad_token_id": 5}, 5),
        ({"pad_token": None, "eos_token": "<|im_end|>"}, {"pad_token_id": None}, 2),
        ({"eos_token": "<|endoftext|>"}, {}, 0),
        ({}, {"eos_token_id": [7, 8]}, 7),
        ({}, {}, 0),
    ],
)
def test_b057_r39_padding_falls_back_to_a_valid_id(tmp_path: Path, named: dict[str, Any], config: dict[str, Any], pad_id: int) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, config=config, **named))
    assert tokenizer.pad_id == pad_id
    assert tokenizer.embedding_size == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("named", "config", "error"),
    [
        ({}, {"pad_token_id": [0, 1]}, r"pad_token_id in .* is \[0, 1\], expected one id"),
        ({}, {"pad_token_id": -1}, r"pad_token_id in .*config.json is -1, expected an id from 0 to"),
        ({}, {"pad_token_id": 100_000}, r"pad_token_id in .*config.json is 100000, expected an id from 0 to"),
        ({}, {"pad_token_id": "<pad>"}, r"pad_token_id in .* is '<pad>', expected an id"),
        ({}, {"pad_token_id": True}, r"pad_token_id in .* is True, expected an id"),
        ({"pad_token": ["<|im_end|>"]}, {}, r"pad_token in .* is \['<|im_end|>'\], expected one token's text"),
        ({"pad_token": "<pad>"}, {}, r"pad_token is '<pad>', but tokenizer.json doesn't know it"),
        ({"pad_token": "<repo_name>"}, {"vocab_size": 3}, r"pad_token is '<repo_name>', but its id 3 is beyond the model's 3 embeddings"),
        ({"eos_token": "<eos>"}, {}, r"eos_token is '<eos>', but tokenizer.json doesn't know it"),
    ],
)
def test_b057_r39_a_padding_that_cannot_be_right_is_one_clear_error(
    tmp_path: Path, named: dict[str, Any], config: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Tokenizer.load(folder_with(tmp_path, config=config, **named))


def test_r39_a_token_beyond_the_embedding_is_named_when_it_occurs(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, config={"vocab_size": 300}, eos_token="<|im_end|>"))
    assert tokenizer.encode("x") and tokenizer.embedding_size == 300
    with pytest.raises(ValueError, match="the model embeds only 300 ids"):
        tokenizer.encode("the international question")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json isn't valid JSON"):
        Tokenizer.load(folder)


def test_b065_threads_get_what_one_thread_gets() -> None:
    """Both ways of reading special tokens at once: the switch between them must not be shared state."""
    tokenizer, draw = Tokenizer.load(SMALL), random.Random(0)
    texts = ["<|im_start|>" + "naïve 12 " * draw.randrange(1, 60) + "<|im_end|>" for _ in range(200)]

    def encode_all(parse_special: bool) -> list[list[int]]:
        return [tokenizer.encode(text, parse_special=parse_special) for text in texts]

    serial = {parse_special: encode_all(parse_special) for parse_special in (False, True)}
    with ThreadPoolExecutor(16) as pool:
        for index, ids in enumerate(pool.map(encode_all, [index % 2 == 0 for index in range(16)])):
            assert ids == serial[index % 2 == 0]


def test_split_special_swallows_the_white_space_that_the_backend_swallows(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", special=True, lstrip=True, rstrip=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    pieces = list(tokenizer.split_special("a <mask>\nb<|im_end|><|im_end|>"))
    assert pieces == ["a", tokenizer.token_id("<mask>"), "b", 2, 2]
    parts = [[piece] if isinstance(piece, int) else tokenizer.encode(piece) for piece in pieces]
    assert [index for part in parts for index in part] == tokenizer.encode("a <mask>\nb<|im_end|><|im_end|>", parse_special=True)


def test_byte_tokenizer_round_trips_any_text_in_few_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_byte_tokenizer(tmp_path))
    text = "a\x00\t ÿ 日本 🎉 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (259, 0, 2)


def test_tiny_tokenizer_has_one_id_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tiny_tokenizer(tmp_path, alphabet="0123456789 ="))
    assert tokenizer.vocab_size == 7 + 12
    assert tokenizer.encode("10 = 9") == [8, 7, 17, 18, 17, 16]
    assert tokenizer.encode("a") == [tokenizer.token_id("<|unknown|>")]
    with pytest.raises(ValueError, match="ASCII"):
        make_tiny_tokenizer(tmp_path, alphabet="é")


def test_tokenizers_that_differ_say_in_what(tmp_path: Path) -> None:
    """By id here; what only the other knows is no difference."""
    make_tiny_tokenizer(tmp_path / "digits", "0123")
    make_tiny_tokenizer(tmp_path / "more", "01234")
    make_tiny_tokenizer(tmp_path / "turned", "0132")
    digits, more, turned = (Tokenizer.load(tmp_path / name) for name in ("digits", "more", "turned"))
    assert digits.differences(more) == []
    assert more.differences(digits) == ["4"]
    assert digits.differences(turned) == ["2", "3"]
