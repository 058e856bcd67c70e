"""Reward functions: a bare name in a configuration's `rewards` is one of these. The manager that calls them is `rewards.manager`."""

from burnish.rewards.answers import boxed, exact, numeric
from burnish.rewards.code import unit_tests
from burnish.rewards.judging import judge
from burnish.rewards.mathematics import math
from burnish.rewards.shape import format_tags, length_penalty

__all__ = ["boxed", "exact", "format_tags", "judge", "length_penalty", "math", "numeric", "unit_tests"]
