"""`burnish serve PATH`: an endpoint in front of a model, for agents that speak to an API. PATH is a run's folder, a model's, or a name."""

from __future__ import annotations

import argparse
import os
from typing import Any

TOKEN_VARIABLE = "BURNISH_SERVE_TOKEN"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="answer agents that speak to an API, and record their sessions", description=__doc__)
    parser.add_argument("path", metavar="PATH", help="a run's folder, a model folder, or a name from `burnish fetch`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 takes a free one (default 8765)")
    parser.add_argument("--no-token", action="store_true", help=f"ask for none; else it is ${TOKEN_VARIABLE}, or made up and shown")
    parser.add_argument("--record", metavar="FILE", default=None, help="append each finished session as a line of JSON")
    parser.add_argument("--tool-parser", default="qwen", help="how the model writes tool calls (default qwen)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer of a request that doesn't say (default 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of a request that doesn't say (default 1)")
    parser.add_argument("--context", type=int, default=4096, help="longest conversation, in tokens (default 4096, or what the model has)")
    parser.add_argument("--slots", type=int, default=16, help="sequences that decode together (default 16)")
    parser.add_argument("--max-kept", type=int, default=512, help="largest kept set of truncated sampling (default 512)")
    parser.add_argument("--precision", choices=("auto", "f32", "bf16"), default="auto", help="what products are computed in (default auto)")
    parser.add_argument("--weights", action="store_true", help="let a run's trainer change the weights (`rollout.engine: burnish`)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio
    import secrets

    from burnish.rollout.server.listen import check_bind

    token = None if args.no_token else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    check_bind(args.host, token)
    return asyncio.run(_serve(args, token))


async def _serve(args: argparse.Namespace, token: str | None) -> int:
    import asyncio
    import json
    import signal

    from burnish.agentic.sessions import Sessions, record
    from burnish.agentic.trajectory import EpisodeContext
    from burnish.cli.result import load_result
    from burnish.config.errors import UserError, suggest
    from burnish.config.schema import EpisodeLimits
    from burnish.models.model import resolve_precision
    from burnish.rollout.native.engine import NativeEngine
    from burnish.rollout.server.app import make_app
    from burnish.rollout.server.listen import Guards, listening
    from burnish.sync.inbox import Inbox
    from burnish.text.tool_parsers import PARSERS
    from burnish.types import SamplingParams, Trajectory

    if args.tool_parser not in PARSERS:
        known = suggest(args.tool_parser, PARSERS) or "; known: " + ", ".join(PARSERS)
        raise UserError(f"there is no tool parser {args.tool_parser}{known}")
    model = load_result(args.path)
    codec, context = model.codec, min(model.config.max_positions, args.context)
    try:
        params = SamplingParams(args.max_tokens, temperature=args.temperature, stop_ids=codec.template.stop_ids)
    except ValueError as error:
        raise UserError(str(error)) from error
    engine = NativeEngine(
        model.config,
        model.params,
        decode_text=codec.tokenizer.decode,
        context=context,
        slots=args.slots,
        prefill_rows=min(args.slots, 8),
        max_kept=args.max_kept,
        precision=resolve_precision(args.precision),
    )

    def keep(trajectory: Trajectory) -> None:
        if args.record is not None:
            with open(args.record, "a", encoding="utf-8") as file:
                file.write(json.dumps(record(trajectory)) + "\n")

    limits = EpisodeLimits(step_timeout_s=None, max_turns=1000)
    episodes = EpisodeContext(engine, codec.template, codec.tokenizer.decode, context, max_prompt_tokens=context - 1, limits=limits)
    sessions = Sessions(str(args.path), episodes, codec.tokenizer, params, PARSERS[args.tool_parser], on_end=keep)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        app = make_app(sessions, Inbox(engine, model.params) if args.weights else None)
        async with listening(app, Guards(token), host=args.host, port=args.port) as (host, port):
            print(f"{args.path} answers at http://{host}:{port}/v1{f' with the token {token}' if token else ''}", flush=True)
            await stop.wait()
    finally:
        await sessions.close()
        await engine.close()
    return 0
