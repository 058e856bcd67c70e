"""Starting the processes of one run, on one machine: each with two devices of its own and jax's collectives over sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 4.0
"""`heartbeat_timeout_s` of these runs."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments: Sequence[str], *, devices: int = 2, faults: str = "") -> subprocess.Popen[str]:
    """`python ARGUMENTS` in a process of its own."""
    environment = {
        **os.environ,
        "BURNISH_FAULTS": faults,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes: Sequence[subprocess.Popen[str]], *, timeout_s: float = 100) -> list[tuple[int, str, str]]:
    """Of each its exit code, standard output and standard error, once all have ended; none outlives this."""
    try:
        return [(process.returncode, out, err) for process in processes for out, err in [process.communicate(timeout=timeout_s)]]
    finally:
        for process in processes:
            process.kill()
