"""What every part of a configuration is made of: a frozen, strict model, and the few types that many fields share."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict

T = TypeVar("T")
Many = Annotated[tuple[T, ...], Strict(False)]
"""A frozen sequence that a list may fill; its items stay strict."""
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Frozen, strict about names and types, documented by the docstrings under its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )
