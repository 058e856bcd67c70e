"""`burnish chat PATH`: talk to a model, a line at a time. PATH is a run's folder, a model folder or a fetched name."""

from __future__ import annotations

import argparse
import sys
from typing import Any

HELP = "an empty line or end of input leaves; /new forgets the conversation"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("chat", help="talk to a model or to what a run has made", description=f"{__doc__} In it: {HELP}.")
    parser.add_argument("path", metavar="PATH", help="a run's folder, a model folder, or a name from `burnish fetch`")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens (default 256)")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from burnish.agentic.agents import ModelAgent
    from burnish.cli.result import load_result
    from burnish.config.errors import UserError
    from burnish.models.model import resolve_precision
    from burnish.rollout.native.engine import NativeEngine
    from burnish.types import Request, SamplingParams

    model = load_result(args.path)
    codec, context = model.codec, min(model.config.max_positions, 4096)
    try:
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, stop_ids=codec.template.stop_ids)
    except ValueError as error:
        raise UserError(str(error)) from error
    decode = codec.tokenizer.decode
    engine = NativeEngine(
        model.config,
        model.params,
        decode_text=decode,
        context=context,
        slots=1,
        prefill_rows=1,
        precision=resolve_precision("auto"),
    )
    agent, turn = ModelAgent(args.system), 0
    agent.reset()
    print(f"talking to {args.path}; {HELP}")
    try:
        while line := _ask():
            if line == "/new":
                agent.reset()
                continue
            agent.update_from_env(line)
            ids = codec.template.encode(agent.messages)
            if len(ids) >= context:
                print(f"the conversation has {len(ids)} tokens, the model takes {context}: /new begins another", file=sys.stderr)
                agent.messages.pop()
                continue
            completion = asyncio.run(engine.generate(Request(tuple(ids), params, seed_path=(args.seed, turn))))
            print(agent.update_from_model(decode(completion.ids.tolist())).text, flush=True)
            turn += 1
    finally:
        asyncio.run(engine.close())
    return 0


def _ask() -> str:
    """The next line; empty at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
