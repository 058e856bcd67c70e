"""Whether another model can read what the policy writes, id for id: a critic and a teacher must. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from burnish.config.errors import UserError
from burnish.models.config import ModelConfig
from burnish.text.codec import Codec
from burnish.text.tokenizer import Tokenizer


def check_reads_ids(key: str, role: str, folder: Path, architecture: ModelConfig, codec: Codec, *, context: int) -> None:
    """Raises UserError where a model's tokenizer, ids or positions don't do for the policy's.

    key: where the model's folder stands in a configuration. role: what it is called. codec: the policy's. context: its longest sequence.
    """
    if (folder / "tokenizer.json").is_file() and (other := codec.tokenizer.differences(Tokenizer.load(folder))):
        raise UserError(
            f"{key}: {folder} has another tokenizer than the policy: {len(other)} tokens have another id there or none, e.g. {other[0]!r}. "
            f"The {role} reads the policy's ids: take a model of the same vocabulary"
        )
    for what, has, needs in (
        ("ids", architecture.vocab_size, codec.tokenizer.vocab_size),
        ("positions", architecture.max_positions, context),
    ):
        if has < needs:
            raise UserError(f"{key}: the model in {folder} has {has} {what}, this run uses {needs}")


__all__ = ["check_reads_ids"]
