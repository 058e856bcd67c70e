"""Locks: what a model path may be, in which order it is tried, and that a wrong one is one plain error with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.models.locate import FETCHABLE, cache_folder, locate


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_wins_over_a_fetched_model_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fetched = make_model(tmp_path / "cache" / "smollm2-135m")
    assert cache_folder() == tmp_path / "cache"
    assert locate("smollm2-135m") == fetched
    local = make_model(tmp_path / "smollm2-135m")
    assert locate("smollm2-135m").absolute() == local
    assert locate(str(local)) == local


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BURNISH_CACHE", raising=False)
    make_model(tmp_path / "model")
    assert locate("~/model") == tmp_path / "model"
    assert cache_folder() == tmp_path / ".cache" / "burnish"


def test_a_name_that_was_not_fetched_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"smollm2-135m.*burnish fetch smollm2-135m"):
        locate("smollm2-135m")


@pytest.mark.parametrize("path", ["./missing", "/no/such/model", "missing", "runs/missing", "a/b/c", ""])
def test_a_missing_folder_is_named_with_what_else_would_do(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/missing` looks like a hub id, but its first part is a folder here: a mistyped path must not become a download."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        locate(path)
    assert path in str(caught.value)
    assert all(name in str(caught.value) for name in FETCHABLE)


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_a_hub_id_that_cannot_be_had_is_one_plain_error() -> None:
    """In its own process: the hub's client reads HF_HUB_OFFLINE once."""
    code = "from burnish.models.locate import locate; locate('no-such-org/no-such-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "burnish.config.errors.MissingFile: no folder 'no-such-org/no-such-model' here, and the hub didn't give a model of that id"
    )
    assert "smollm2-135m" in last
