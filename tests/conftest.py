"""The conditions under which every test runs: strict numerics, 8 fake CPU devices, checked shapes, quick compiles that are kept.

Only environment variables are set here, so a test without jax doesn't pay for jax; jax reads them when a test first imports it, and so
do the subprocesses that tests start.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores SIGINT, and so would every process that a test starts to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # The same of SIGHUP under nohup: these tests go on, and what they start doesn't inherit a handler.
    signal.signal(signal.SIGHUP, lambda *_: None)

QUICK = "JAX_DISABLE_MOST_OPTIMIZATIONS"
OPTIMISED = ("optimised", "smollm2", "learn", "parity", "docs_slow", "soak", "gemma3", "vllm")
"""Markers of tests whose programs are compiled as users' are. The others skip LLVM's expensive passes, which models this small
don't repay; XLA's own passes, which decide what is computed, are the same."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture compiles: how this test's programs, and those of the processes that it starts, are compiled.

    A program that was compiled in one way is never run beside one that was compiled in the other: their bits may differ.
    """
    quick = not any(item.get_closest_marker(name) for name in OPTIMISED)
    changed = os.environ.get(QUICK) != str(int(quick))
    os.environ[QUICK] = str(int(quick))  # read by a jax that is imported later
    if changed and (jax := sys.modules.get("jax")):
        jax.config.update(QUICK.lower(), quick)
        jax.clear_caches()


DEEP = [line for line in (ROOT / "tests" / "deep.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only `make deep` runs, before `-m` is looked at."""
    met: set[str] = set()
    for item in items:
        for line in DEEP:
            if item.nodeid.startswith(line):
                item.add_marker("deep")
                met.add(line)
    whole = not config.option.keyword and [Path(arg) for arg in config.args] in ([ROOT / "tests"], [Path("tests")])
    if whole and (unmet := sorted(set(DEEP) - met)):
        raise pytest.UsageError(f"tests/deep.txt names tests that aren't there: {', '.join(unmet)}")


SHAPED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "burnish").rglob("*.py"))
    if "from jaxtyping import" in file.read_text(encoding="utf-8")
]
"""The modules that say shapes. What is passed there is checked against them at run time, in tests only; a check costs each call some
40 us, and each definition of an inner function a millisecond, so no other module pays."""

install_import_hook(SHAPED, "beartype.beartype")

collect_ignore = [] if importlib.util.find_spec("torch") else ["parity"]  # only `make parity` installs other people's implementations
