"""What this machine can do: python machine.py TARGET

GFLOP/s of one large product in float32 (numpy's BLAS, and XLA) and from bf16 operands to a float32 result (XLA), and GB/s of a copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from work import versions, write

SIZE, REPEATS = 2048, 5


def best_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    a = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    memory = np.zeros(1 << 27, np.uint8)
    product = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))
    f32, bf16 = jnp.asarray(a), jnp.asarray(a, jnp.bfloat16)
    flops = 2 * SIZE**3 / 1e9
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    write(
        sys.argv[1],
        cpu=next(line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")),
        cores=cpu.count("processor\t"),
        amx="amx_bf16" in cpu.split(),
        gflops={
            "numpy f32": flops / best_seconds(lambda: a @ a),
            "XLA f32": flops / best_seconds(lambda: product(f32, f32).block_until_ready()),
            "XLA bf16 to f32": flops / best_seconds(lambda: product(bf16, bf16).block_until_ready()),
        },
        copy_gb_per_second=2 * memory.nbytes / best_seconds(memory.copy) / 1e9,
        versions=versions("jax", "numpy"),
    )


if __name__ == "__main__":
    main()
