"""From `rollout.engine` and its options to an engine that isn't the native one.

Owns this choice. The native engine is made by the cluster itself, as it shares the cluster's devices.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from burnish.config.engines import BurnishConfig, ScriptedConfig, ServersConfig, SglangConfig, VllmConfig, read_options
from burnish.config.errors import UserError
from burnish.config.resolve import check_options, resolve
from burnish.config.schema import RolloutConfig
from burnish.rollout.burnish import BurnishDialect
from burnish.rollout.engine import Engine
from burnish.rollout.remote.dialect import Dialect, ServerSetup
from burnish.rollout.remote.editions import Kind
from burnish.rollout.remote.engine import Connections, RemoteEngine
from burnish.rollout.remote.lives import LifeLimits
from burnish.rollout.scripted import ScriptedEngine
from burnish.rollout.setup import EngineSetup
from burnish.rollout.sglang import SglangDialect
from burnish.rollout.vllm import VllmDialect
from burnish.sync.depot import Depot

MakeEngine = Callable[[EngineSetup], Engine]


def engine_maker(rollout: RolloutConfig, *, base: Path = Path()) -> MakeEngine | None:
    """What makes the engine that a configuration names, once its model is known; None for the native one.

    base: from where files are named. Raises UserError for an engine that isn't there and for options
    that it doesn't take, before anything is loaded.
    """
    options = read_options(rollout.engine, rollout.options)
    if rollout.engine == "native":
        return None
    match options:
        case VllmConfig() | SglangConfig():
            return partial(_servers, options)
        case BurnishConfig():
            return partial(_burnish, options)
        case ScriptedConfig():
            return partial(_scripted, options, resolve(options.reply, kind="reply", base=base))
    engine = resolve(rollout.engine, kind="engine", base=base)
    check_options(engine, rollout.options, what=f"engine `{rollout.engine}`", reserved=("setup",))
    return partial(_own, engine, rollout)


def _own(engine: Callable[..., Engine], rollout: RolloutConfig, setup: EngineSetup) -> Engine:
    made = engine(setup, **rollout.options)
    if not isinstance(made, Engine):
        raise UserError(f"rollout.engine: {rollout.engine} made a {type(made).__name__}, which isn't an engine (docs/adding-an-engine.md)")
    return made


def _scripted(options: ScriptedConfig, reply: Callable[..., list[int]], setup: EngineSetup) -> Engine:
    return ScriptedEngine(
        reply, latency_s=lambda request: options.latency_s, decode_text=setup.decode_text, context=setup.context, slots=setup.slots
    )


def _servers(options: VllmConfig | SglangConfig, setup: EngineSetup) -> Engine:
    kind: Kind = "adapter" if setup.adapter_rank is not None and options.weights == "adapter" else "model"
    return RemoteEngine(
        _dialect(options, setup, kind),
        _connections(options, setup, options.token),
        writer=setup.writer(kind),
        decode_text=setup.decode_text,
        context=setup.context,
        start=setup.model,
        folder=None if options.folder is None else Path(options.folder),
        limits=_limits(options),
    )


def _burnish(options: BurnishConfig, setup: EngineSetup) -> Engine:
    # Who may change weights has a token, also on the loopback interface; launched servers and this process agree on one.
    token = options.token if options.token or options.urls else secrets.token_urlsafe(24)
    depot = Depot(
        setup.writer("model" if setup.adapter_scale is None else "adapter").check,
        scale=setup.adapter_scale,
        way=options.transport,
        host=options.host,
    )
    servers = ServerSetup(
        setup.model,
        setup.decode_text,
        "model",
        context=setup.context,
        slots=setup.slots,
        max_kept=setup.max_kept,
        token=token,
        python=options.python or sys.executable,
        arguments=options.arguments,
        environment=options.environment,
        timeout_s=options.timeout_s,
    )
    return RemoteEngine(
        BurnishDialect(servers, depot, options.fetch_timeout_s, setup.precision),
        _connections(options, setup, token),
        writer=depot,
        decode_text=setup.decode_text,
        context=setup.context,
        start=setup.model,
        limits=_limits(options),
    )


def _connections(options: ServersConfig, setup: EngineSetup, token: str | None) -> Connections:
    return Connections(options.urls, 0 if options.urls else options.launch, token=token, slots=setup.slots, logs=setup.logs)


def _dialect(options: VllmConfig | SglangConfig, setup: EngineSetup, kind: Kind) -> Dialect:
    given = options.dtype if isinstance(options, VllmConfig) else "auto"
    servers = ServerSetup(
        setup.model,
        setup.decode_text,
        kind,
        context=setup.context,
        slots=setup.slots,
        max_kept=setup.max_kept,
        support=options.support,
        adapter_rank=setup.adapter_rank if kind == "adapter" else None,
        dtype={"f32": "float32", "bf16": "bfloat16"}[setup.precision] if given == "auto" else given,
        token=options.token,
        python=options.python,
        arguments=options.arguments,
        environment=options.environment,
        timeout_s=options.timeout_s,
    )
    return VllmDialect(servers) if isinstance(options, VllmConfig) else SglangDialect(servers)


def _limits(options: ServersConfig) -> LifeLimits:
    return LifeLimits(restarts=options.restarts, start_timeout_s=options.start_timeout_s, health_every_s=options.health_every_s)


__all__ = ["MakeEngine", "engine_maker"]
