"""`burnish export SOURCE OUT [--adapter]`: a model or an adapter as a folder that transformers, PEFT and vLLM load.

SOURCE is a run's folder, a model folder, a name from `burnish fetch` or a hub id. OUT becomes a Hugging Face folder, with a run's adapter
merged into what it was trained beside: its base, in few bits where the run kept it so. With `--adapter` it becomes the run's adapter
alone, in PEFT's format.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="write a model or an adapter for other programs", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a run's folder, a model folder, a fetched name or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which mustn't exist yet or must be empty")
    parser.add_argument("--adapter", action="store_true", help="the run's adapter alone, in PEFT's format")
    parser.add_argument("--base", metavar="NAME", help="with --adapter: what it shall call its base; default: the path that the run used")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the stored weights; default: the source's own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.config.errors import UserError

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"{args.out} is there already; name a folder that doesn't exist, or an empty one")
    if args.base is not None and not args.adapter:
        raise UserError("--base says what an adapter's base is called; it goes with --adapter")
    print(_adapter(args) if args.adapter else _model(args))
    return 0


def _model(args: argparse.Namespace) -> str:
    """Needs no tokenizer and no chat template: a base model can be exported too."""
    import jax

    from burnish.cli.result import find_result, with_adapter
    from burnish.models import families, weights
    from burnish.models.locate import locate
    from burnish.text.tokenizer import read_json

    path, adapter = find_result(args.source)
    folder = locate(str(path))
    raw = read_json(folder / "config.json")
    dtype, scored = args.dtype or families.stored_dtype(raw), families.is_classifier(raw)
    if scored:
        config, params = weights.load_scalar(folder)
        weights.save_scalar(args.out, config, params, like=folder, dtype=dtype)
    else:
        config, params = weights.load(folder)
        params = params if adapter is None else with_adapter(params, config, adapter)
        weights.save(args.out, config, params, like=folder, dtype=dtype)
    size, count = sum(file.stat().st_size for file in args.out.glob("*.safetensors")), sum(x.size for x in jax.tree.leaves(params))
    kind = "sequence classifier" if scored else "language model"
    return f"{args.out} is a {kind} of the {config.family} family: {count:,} weights, {dtype}, {size / 1e6:,.1f} MB"


def _adapter(args: argparse.Namespace) -> str:
    from burnish.config.errors import UserError
    from burnish.models import weights
    from burnish.models.families import FAMILIES
    from burnish.models.locate import locate
    from burnish.text.tokenizer import read_json

    folder = Path(args.source) / "adapter"
    if not folder.is_dir():
        raise UserError(f"{args.source} holds no adapter/: only a run with model.lora makes one; without --adapter the model is written")
    described = read_json(folder / "adapter_config.json")
    base = described["base_model_name_or_path"]
    config = weights.load_config(locate(base))
    if FAMILIES[config.family].fused:
        joined = ", ".join(tensor.split(".")[-1] for tensor in FAMILIES[config.family].fused)
        raise UserError(f"PEFT has one matrix each for {joined} of {config.family}, an adapter here one for each part: export it merged")
    weights.copy_adapter(folder, args.out, config, base=args.base or base)
    return f"{args.out} is an adapter of rank {described['r']} on {', '.join(described['target_modules'])} of {args.base or base}"
