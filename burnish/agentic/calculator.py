"""A calculator for models: arithmetic out of an allow-list of syntax, with bounded cost. Nothing is ever evaluated as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from burnish.agentic.tools import BaseTool

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Largest integer that comes up on the way."""

Number = int | float


def _round(number: Number, digits: int = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 30:  # an integer rounded to -10**9 places takes gigabytes
        raise ValueError(f"round takes a number of places from -30 to 30, got {digits}")
    return round(number, digits) if digits else round(number)


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "floor": math.floor, "log": math.log, "max": max, "min": min,
    "round": _round, "sin": math.sin, "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(BaseTool):
    """The calculator as a tool; a mistake in an expression is an error that says what is allowed."""

    def run(self, expression: str) -> str:
        """Compute an arithmetic expression, e.g. (2 + 3) * 4 or sqrt(2) ** 3.

        Args:
            expression: numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, round, min
        """
        return str(calculate(expression))


def calculate(expression: str) -> Number:
    """The value of an expression. Raises ValueError for syntax that isn't allowed and for what would be too large, ArithmeticError as
    Python does."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r:.80} isn't an arithmetic expression") from error
    try:
        return _value(tree.body)
    except RecursionError as error:
        raise ValueError("the expression is nested too deeply") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool:
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(type(op), _value(left), _value(right))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
        case _:
            raise ValueError(f"{ast.unparse(node)!r:.80} isn't allowed: only numbers, + - * / // % **, pi, e and {', '.join(_FUNCTIONS)}")


def _binary(op: type[ast.operator], left: Number, right: Number) -> Number:
    """The result, refused before it is computed where an integer would grow beyond the bound."""
    if op is ast.Pow and isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_BITS:
        raise ValueError(f"{left}**{right} is too large")
    return _bounded(_BINARY[op](left, right))


def _bounded(number: Number) -> Number:
    if isinstance(number, complex):
        raise ValueError("the result isn't a real number")
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ValueError("a number is too large")
    return number


__all__ = ["Calculator", "calculate"]
