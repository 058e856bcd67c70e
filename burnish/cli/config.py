"""`burnish config`: show where every value comes from, or write the schema. Changes nothing."""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="show a configuration with the source of every value, or its JSON schema")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every value and where it comes from")
    options.add_config_arguments(show)
    show.set_defaults(run=run_show)
    schema = actions.add_parser("schema", help="write the JSON schema, for editors")
    schema.set_defaults(run=run_schema)


def run_show(args: argparse.Namespace) -> int:
    from burnish.config.loader import dump_config

    print(dump_config(options.load(args)), end="")
    return 0


def run_schema(args: argparse.Namespace) -> int:
    from burnish.config.loader import json_schema

    print(json_schema(), end="")
    return 0
