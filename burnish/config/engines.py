"""Options of engines that aren't the native one: what `rollout.options` may hold for each `rollout.engine`.

Owns their names, bounds and meaning. An engine of a user's own takes what its class takes (`config.resolve.check_options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from burnish.config.errors import suggest
from burnish.config.section import Many, Positive, Section

Seconds = Annotated[float, Field(gt=0)]


class ServersConfig(Section):
    """Servers that sample for a run: some that are there, or some that burnish starts on this machine and ends with the run."""

    urls: Many[Annotated[str, Field(pattern=r"^https?://[^/]+$")]] = ()
    """Addresses of servers that are there, e.g. `http://127.0.0.1:8000`. None: they are launched."""
    launch: Positive = 1
    """How many servers are started here, where `urls` names none."""
    arguments: Many[str] = ()
    """More arguments of launched servers, after burnish's own."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment of launched servers; `{index}` in a value is the server's number, from 0."""
    token: str | None = None
    """Sent with every request as a bearer token; launched servers ask for it. A secret."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How many deaths of one server are made good before the run ends: by a restart, or, of a server at `urls`, by waiting for it."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for a server to answer, in seconds."""
    health_every_s: Seconds = 10.0
    """Seconds between two health checks of a server; after three in a row without an answer it counts as dead."""
    timeout_s: Seconds = 600.0
    """Longest wait for an answer, in seconds; then the server counts as dead."""


class FolderServersConfig(ServersConfig):
    """Other people's servers, which read weights from folders."""

    python: str = "python3"
    """The interpreter of launched servers: that of the environment which the engine is installed in."""
    weights: Literal["adapter", "merged"] = "adapter"
    """What a run that trains an adapter pushes: the adapter, or the whole model with it merged in. Without an adapter: the whole model."""
    folder: str | None = None
    """Where weights are written for the servers to read, by the same path for both. Null: a temporary folder of this machine."""
    support: Literal["kept", "biased"] = "kept"
    """How truncated sampling (top-k, top-p, min-p) is trained: `kept` has the server say what was kept, and refuses what it can't say;
    `biased` takes its log-probs as if nothing had been cut off (docs/engines.md)."""


class BurnishConfig(ServersConfig):
    """`burnish serve --weights`: the native engine in processes of its own. Weights go there without a folder that both see."""

    python: str | None = None
    """The interpreter of launched servers; null: the run's own."""
    transport: Literal["transfer", "socket"] = "transfer"
    """How weights travel: `transfer`, from device to device by `jax.experimental.transfer`; or `socket`, plain TCP, where that doesn't
    work."""
    host: str = "127.0.0.1"
    """The address of the trainer's machine at which the servers fetch weights: another than the loopback's where they are elsewhere."""
    fetch_timeout_s: Seconds = 300.0
    """Longest way of one array to a server, in seconds; then the push fails and the old weights stay."""


class VllmConfig(FolderServersConfig):
    """vLLM."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers that launched servers compute with; `auto`: bfloat16, float32 where the run's precision is f32."""


class SglangConfig(FolderServersConfig):
    """SGLang."""


class ScriptedConfig(Section):
    """Says what a function tells it to: for tests of a whole run without a model."""

    reply: str
    """`my_pkg.mod:fn` or `./file.py:fn`: a request → the ids that a model would go on with."""
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that each answer takes."""


OPTIONS: Mapping[str, type[Section]] = {
    "vllm": VllmConfig,
    "sglang": SglangConfig,
    "burnish": BurnishConfig,
    "scripted": ScriptedConfig,
}
"""By the name that `rollout.engine` takes."""


def read_options(engine: str, options: Mapping[str, Any]) -> Section | None:
    """The options of a named engine; None for the native one and for a user's own. Raises ValueError for what doesn't fit."""
    if engine == "native":
        if options:
            raise ValueError(f"`options` {', '.join(options)} are for other engines: the native one is set by the keys beside it")
        return None
    model = OPTIONS.get(engine)
    if model is None:
        if ":" in engine:
            return None
        known = ", ".join(["native", *OPTIONS])
        raise ValueError(f"there is no engine `{engine}`{suggest(engine, ['native', *OPTIONS])}; known: {known}, `my_pkg.mod:Engine`")
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"options of the engine `{engine}`: {'; '.join(_mistakes(error, model))}") from error


def _mistakes(error: ValidationError, model: type[Section]) -> list[str]:
    found = []
    for mistake in error.errors(include_url=False):
        key = ".".join(map(str, mistake["loc"]))
        unknown = mistake["type"] == "extra_forbidden"
        words = f"there is no such option{suggest(key, model.model_fields)}" if unknown else mistake["msg"]
        found.append(f"`{key}`: {words}" if key else words)
    return found


__all__ = [
    "OPTIONS",
    "BurnishConfig",
    "FolderServersConfig",
    "ScriptedConfig",
    "ServersConfig",
    "SglangConfig",
    "VllmConfig",
    "read_options",
]
