"""The tools that a configuration's `tool_map` may name without a module: what is in `__all__`."""

from __future__ import annotations

from burnish.agentic.calculator import Calculator
from burnish.agentic.sandbox import PYTHON, Sandbox, SandboxLimits
from burnish.agentic.tools import BaseTool


class Python(BaseTool):
    """Runs Python programs in the sandbox, each in a new one. Made where there is no isolation it raises `SandboxUnavailable`.

    seconds: for one program; keep it below the environment's `timeout_s`, so that what was printed until then is told.
    """

    def __init__(self, *, seconds: float = 5.0) -> None:
        self._sandbox = Sandbox(SandboxLimits(seconds=seconds, output_bytes=16 * 2**10))

    def run(self, code: str) -> str:
        """Run a Python program. You get what it prints; nothing is kept for the next one.

        Args:
            code: the program; print what you want to see
        """
        return self._sandbox.run([PYTHON, "main.py"], files={"main.py": code}).told()


__all__ = ["Calculator", "Python"]
