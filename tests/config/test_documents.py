"""YAML as the 1.2 core schema reads it, and what is refused: tags, duplicate keys, alias bombs, floods. (R51)"""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from burnish.config import documents
from burnish.config.documents import DocumentError, parse, parse_value
from burnish.config.errors import ConfigError
from burnish.config.loader import load_config


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("Null", None),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("tRue", "tRue"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("=", "="),
    ],
)
def test_a_scalar_means_what_yaml_1_2_says(text: str, value: Any):
    got = parse(f"key: {text}").values["key"]
    assert got == value and type(got) is type(value)
    assert parse_value(text) == value


def test_nan_is_read_as_a_number():
    assert math.isnan(documents.scalar(".nan"))


def test_lines_are_those_of_the_keys():
    document = parse("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n")
    assert document.values == {"a": {"b": 1, "c": ["x", {"y": 2}]}}
    assert document.lines == {"": 1, "a": 1, "a.b": 2, "a.c": 3, "a.c.0": 4, "a.c.1": 5, "a.c.1.y": 5}


def test_r51_object_tags_are_refused_and_run_nothing(tmp_path: Path):
    canary = tmp_path / "canary"
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{seed: 1}}\nmodel:\n  path: !!python/object/apply:os.system ['touch {canary}']\n")
    with pytest.raises(ConfigError, match=r"model.path: the tag !!python/object/apply:os.system is refused.*run.yaml:3"):
        load_config(file, [], {})
    with pytest.raises(ConfigError, match=r"data.options: the tag !!python/name:os.system is refused"):
        load_config(None, ["data.options=!!python/name:os.system"], {})
    with pytest.raises(ConfigError, match="the tag !mine is refused"):
        load_config(None, ["data.options={a: !mine 1}"], {})
    assert not canary.exists()


def test_r51_duplicate_keys_are_refused_at_any_depth():
    document = parse("a: {b: 1, c: 2, b: 3}\nd: 1\na: 2\n")
    assert document.mistakes == [
        ("a.b", 1, "the key is written twice, first in line 1"),
        ("a", 3, "the key is written twice, first in line 1"),
    ]


def test_r51_an_alias_bomb_and_an_alias_of_itself_are_refused():
    levels = "\n".join(f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
    with pytest.raises(DocumentError, match="more than 100000 values once its aliases are expanded"):
        parse(f"k0: &a0 x\n{levels}\n")
    with pytest.raises(DocumentError, match="nested deeper than"):
        parse("a: &a [*a]\n")


def test_an_ordinary_alias_is_fine():
    assert parse("a: &x {b: 1}\nc: *x\n").values == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"a: [1, 2", "isn't YAML"),
        (b"a: b: c", "isn't YAML: mapping values are not allowed here"),
        (b"a: 1\n---\nb: 2\n", "isn't YAML"),
        (b"\xff\xfe\xfa", "isn't UTF-8"),
        (b"a: \x00", "isn't YAML"),
        (b"- 1\n- 2\n", "must be a mapping of sections"),
        (b"just text", "must be a mapping of sections"),
        (b"a: " + b"[" * 1000, "nested"),
        (b"#" * (documents.MAX_BYTES + 1), "is larger than 1048576 bytes"),
    ],
)
def test_an_unreadable_file_is_a_plain_error_with_the_file(tmp_path: Path, raw: bytes, message: str):
    file = tmp_path / "run.yaml"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file, [], {})
    assert str(file) in caught.value.mistakes[0].source


def test_a_pipe_or_a_folder_is_no_configuration_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path):
        with pytest.raises(ConfigError, match="there is no configuration file"):
            load_config(path, [], {})


def test_keys_must_be_text():
    assert parse("1: a\ntrue: b\n? [x]\n: c\n").mistakes == [
        ("", 1, "a key must be text, got 1"),
        ("", 2, "a key must be text, got True"),
        ("", 3, "a key must be text, got ['x']"),
    ]


def test_an_empty_file_is_the_defaults(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "run.yaml", [], {}).config == load_config(None, [], {}).config


def test_a_number_with_thousands_of_digits_is_a_text():
    for text in ("9" * 5000, "0x" + "f" * 5000):
        assert documents.scalar(text) == text
