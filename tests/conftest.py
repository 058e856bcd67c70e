"""The conditions under which every test runs: strict numerics, 8 fake CPU devices, checked shapes, a shared compile cache.

Only environment variables are set here, so a test without jax doesn't pay for jax; jax reads them when a test first imports it, and so
do the subprocesses that tests start.
"""

import importlib.util
import os
from pathlib import Path

from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

DEVICE_ROOMS = ["burnish.models", "burnish.rl", "burnish.rollout.native", "burnish.sync", "burnish.train"]
"""Where jaxtyping's shapes are checked against what is passed, at run time, in tests only."""

install_import_hook(DEVICE_ROOMS, "beartype.beartype")

collect_ignore = [] if importlib.util.find_spec("torch") else ["parity"]  # only `make parity` installs other people's implementations
