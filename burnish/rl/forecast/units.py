"""Bytes and rates as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from burnish.config.errors import UserError

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)(/s)?")


def parse_size(text: str, *, option: str) -> int:
    """Bytes: `95GiB`, `80GB`. Raises `UserError` that names the option."""
    return int(_parse(text, option, rate=False, example="95GiB"))


def parse_rate(text: str, *, option: str) -> float:
    """Bytes a second: `100GB/s`, `400Gbit/s`."""
    return _parse(text, option, rate=True, example="100GB/s or 400Gbit/s")


def _parse(text: str, option: str, *, rate: bool, example: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    number, unit, per_second = found.groups() if found else ("0", "", None)
    bits = unit.removesuffix("bit") + "B" if rate and unit.endswith("bit") else None
    factor = _SIZES.get(unit) if bits is None else _SIZES.get(bits, 0) / 8
    if not factor or bool(per_second) != rate or float(number) == 0:
        raise UserError(f"{option} {text!r} isn't {'a rate' if rate else 'a size'}: write a number above 0 and a unit, e.g. {example}")
    return float(number) * factor


def size(num_bytes: int) -> str:
    """Three digits and the largest unit that leaves something before the point: `1.99 GiB`; `-` for nothing."""
    if num_bytes == 0:
        return "-"
    unit = next((name for name in ("TiB", "GiB", "MiB", "KiB") if num_bytes >= _SIZES[name]), "B")
    number = num_bytes / _SIZES[unit]
    return f"{num_bytes} B" if unit == "B" else f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def seconds(duration: float) -> str:
    """`0.13 s`, `4.2 ms`."""
    return f"{duration:.3g} s" if duration >= 0.1 else f"{1000 * duration:.2g} ms"


def aligned(lines: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns two blanks apart; those in `right` end at one edge."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [f"{cell:>{width}}" if i in right else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)
