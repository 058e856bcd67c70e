from pathlib import Path

import pytest

from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import Shell, write_task


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return folder


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def task(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in a folder of its own; the working directory is another."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return write_task(tmp_path / "task", model_folder)
