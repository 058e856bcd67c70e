"""`burnish config`: show where every value comes from, or write the schema. Changes nothing."""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="show a configuration with the source of every value, or its JSON schema")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    options.add_config_arguments(actions.add_parser("show", help="print every value and where it comes from"))
    actions.add_parser("schema", help="write the JSON schema, for editors")


def run(args: argparse.Namespace) -> int:
    from burnish.config.loader import dump_config, json_schema

    print(json_schema() if args.action == "schema" else dump_config(options.load(args)), end="")
    return 0
