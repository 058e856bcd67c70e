"""`burnish config`: where every value comes from, how the sizes of a step fit together, the JSON schema, the page of all keys."""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="show a configuration, the sizes of its steps, the JSON schema, all keys")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every value and where it comes from")
    options.add_config_arguments(show)
    options.add_config_arguments(actions.add_parser("sizes", help="print what each size of a step comes to, and what it means"))
    schema = actions.add_parser("schema", help="write the JSON schema, for editors")
    for action in (show, schema):
        action.add_argument(
            "--of",
            choices=("train", "sft", "dpo", "distill", "reward-model"),
            default="train",
            help="the command that it configures (default train)",
        )
    actions.add_parser("docs", help="write docs/configuration.md: every key with type, default and meaning")


def run(args: argparse.Namespace) -> int:
    from burnish.config.loader import dump_config, json_schema
    from burnish.config.reference import reference
    from burnish.config.schema import Config
    from burnish.config.tuning import CONFIGS
    from burnish.rl.batch_plan import BatchPlan

    match args.action:
        case "schema":
            print(json_schema(CONFIGS[args.of]), end="")
        case "docs":
            print(reference(), end="")
        case "sizes":
            config = options.load(args, Config).config
            print(BatchPlan.from_config(config.training, config.algorithm, config.rollout).table())
        case _:
            print(dump_config(options.load(args, CONFIGS[args.of])), end="")
    return 0
