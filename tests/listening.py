"""Who listens, as the kernel has it."""

import contextlib
import os
import socket
import struct
from pathlib import Path

from burnish.agentic.processes import descendants

_LISTEN = "0A"


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process or one of its descendants listens."""
    inodes = set()
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((_readable(address), int(port, 16)))
    return found


def _readable(address: str) -> str:
    words = [struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
