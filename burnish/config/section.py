"""What every part of a configuration is made of: a frozen, strict model, and the few types that many fields share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

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

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """A field that a subclass gives another default still means what its parent says."""
        parents = [parent for parent in cls.__mro__[1:] if issubclass(parent, Section)]
        silent = [(name, info) for name, info in cls.model_fields.items() if info.description is None]
        for name, info in silent:
            info.description = next((p.model_fields[name].description for p in parents if name in p.model_fields), None)
        if any(info.description for _, info in silent):
            cls.model_rebuild(force=True)  # the JSON schema is made of what was there when the class was built
