"""What a run gives to an engine that it makes, beside the engine's own options.

Owns this record; no jax. `rl.engines` makes engines of it, a user's own included: `MyEngine(setup, **options)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burnish.rollout.draft import DecodeText
from burnish.rollout.remote.editions import Kind, WeightWriter


@dataclass(frozen=True)
class EngineSetup:
    """model: the folder of the first weights, Hugging Face's layout. decode_text: ids → text, for stop strings. context: the most tokens of
    prompt and completion together. slots, max_kept: as `rollout` says. precision: what the trainer multiplies in. adapter_rank: None where
    every weight is trained. writer: of what is pushed to folders, adapters or whole models. logs: a folder for what an engine's processes
    say."""

    model: Path
    decode_text: DecodeText
    context: int
    slots: int
    max_kept: int
    precision: Literal["f32", "bf16"]
    adapter_rank: int | None
    adapter_scale: float | None
    writer: Callable[[Kind], WeightWriter]
    logs: Path


__all__ = ["EngineSetup"]
