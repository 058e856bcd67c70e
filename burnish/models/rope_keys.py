"""What a `config.json` says about rotary embeddings, in its newer and its older form, read and written.

Owns those keys; the record is `config.RopeConfig`, the formulas `rope.py`. Called by `families.py` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from burnish.models.config import RopeConfig, RopeKind

_KINDS: Mapping[str, RopeKind] = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_KEYS = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "original_max_position_embeddings"}
FULL, SLIDING = "full_attention", "sliding_attention"
"""What `layer_types` calls layers that see everything and layers that see a window."""


def read_rope(raw: Mapping[str, Any]) -> tuple[RopeConfig | None, list[str]]:
    """RoPE from `rope_parameters` (newer) or `rope_theta` with `rope_scaling` (older); both may be there if they agree."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    bases = {source["rope_theta"] for source in (new, old, raw) if source.get("rope_theta") is not None}
    problems = []
    if not bases:
        problems.append("the RoPE base is missing: neither rope_theta nor rope_parameters.rope_theta is set")
    if len(bases) > 1:
        problems.append(f"rope_theta is given with different values: {sorted(bases)}")
    scaling = old or new
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if old and new and kind != (new.get("rope_type") or new.get("type") or "default"):
        problems.append(f"rope_scaling says {kind!r}, rope_parameters {new.get('rope_type')!r}")
    partial = raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        problems.append(f"partial_rotary_factor is {partial}; only the whole head can be rotated")
    if kind not in _KINDS:
        return None, [*problems, f"the RoPE type {kind!r} isn't supported; supported: {', '.join(_KINDS)}"]
    keys = _KEYS[_KINDS[kind]]
    problems += [f"RoPE type {kind!r} needs the key {key!r}" for key in keys if scaling.get(key) is None and key not in _OPTIONAL]
    if problems or raw.get("max_position_embeddings") is None:
        return None, problems
    values = {ours: scaling[hf] for hf, ours in keys.items() if scaling.get(hf) is not None}
    if "original_max_position_embeddings" in keys:
        # Without its own key, the length before stretching is the model's: what transformers takes too.
        values.setdefault("original_max_positions", raw["max_position_embeddings"])
    return RopeConfig(theta=float(bases.pop()), kind=_KINDS[kind], **values), []


def read_two_ropes(raw: Mapping[str, Any]) -> tuple[RopeConfig | None, RopeConfig | None, list[str]]:
    """Of layers that see everything and of those that see a window: `rope_parameters` by layer type (newer), or the usual older keys with
    `rope_local_base_freq`, which is never stretched."""
    new = raw.get("rope_parameters") or {}
    typed = FULL in new or SLIDING in new
    length = {"max_position_embeddings": raw.get("max_position_embeddings")}
    wide_raw = {key: raw[key] for key in ("rope_theta", "rope_scaling") if key in raw} | length
    local_raw = {"rope_theta": raw.get("rope_local_base_freq")} | length
    if typed:
        wide_raw["rope_parameters"], local_raw["rope_parameters"] = new.get(FULL), new.get(SLIDING)
    wide, problems = read_rope(wide_raw)
    local, local_problems = read_rope(local_raw)
    return wide, local, problems + [f"of layers with a window: {problem}" for problem in local_problems]


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters`, and beside it the older keys."""
    kind, values = _kind_and_values(rope)
    older = {"rope_scaling": {"rope_type": kind, **values}} if values else {}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **values}, "rope_theta": rope.theta, **older}


def write_two_ropes(wide: RopeConfig, local: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` by layer type, and the older keys."""
    raw, of_local = write_rope(wide), write_rope(local)
    typed = {FULL: raw["rope_parameters"], SLIDING: of_local["rope_parameters"]}
    return raw | {"rope_parameters": typed, "rope_local_base_freq": local.theta}


def _kind_and_values(rope: RopeConfig) -> tuple[str, dict[str, Any]]:
    fields = asdict(rope)
    values = {hf: fields[ours] for hf, ours in _KEYS[rope.kind].items() if fields[ours] is not None}
    return next(hf for hf, ours in _KINDS.items() if ours == rope.kind), values
