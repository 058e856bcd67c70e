"""Weights on their way to a server: one version of them in a folder, and who writes it.

Owns the names that both sides of that way use; no jax. Folders are written by `sync.folder`, read by servers. For servers that read none, a
folder's path is only a name, by which `sync.depot` keeps the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Kind = Literal["adapter", "model"]
START = "start"
"""The weights that a server starts with."""
PUSHED = "burnish-"
"""What the names of all others begin with."""


@dataclass(frozen=True, slots=True)
class Edition:
    """A version in a folder: an adapter in PEFT's format, or a whole model in Hugging Face's.

    name: what a server knows it by; another one for each push of any run, as a server remembers what a name meant. folder: None for the
    weights that a server starts with, where these are the base of adapters.
    """

    version: int
    name: str
    kind: Kind
    folder: Path | None

    def is_labelled(self, label: str) -> bool:
        """Whether a server that calls its weights `label` has these. What it calls those that it starts with is its own affair."""
        return label == self.name or (self.name == START and not label.startswith(PUSHED))


@runtime_checkable
class WeightWriter(Protocol):
    """Turns the leaves that were pushed into a folder that a server can read."""

    @property
    def kind(self) -> Kind: ...

    def check(self, name: str, array: Any) -> None:
        """Raise ValueError for a leaf that isn't one of the model's."""
        ...

    def write(self, folder: Path, leaves: Mapping[str, Any], *, last: Path | None, checksum: int | None) -> None:
        """Write all weights to a new folder. last: the folder of the version before, for leaves that weren't pushed; None: the first.

        Raises RuntimeError where what came, or what stands in the folder now, hasn't the checksum.
        """
        ...

    def remove(self, folder: Path) -> None:
        """A version that isn't needed any more, written or not."""
        ...

    def close(self) -> None:
        """No server will ask for weights any more."""
        ...


__all__ = ["PUSHED", "START", "Edition", "Kind", "WeightWriter"]
