"""Compiled programs are kept for the next process, where the user hasn't said otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from burnish.train.compiles import keep_compiled

PROGRAM = """
import jax
from burnish.train.compiles import _processor, keep_compiled
keep_compiled()
print(jax.config.jax_compilation_cache_dir, _processor())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(3))
"""


def ask(cache: Path, **environment: str) -> str:
    """What a fresh process says of its cache's folder and of its processor."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | {"JAX_PLATFORMS": "cpu"}
    clean |= {"BURNISH_CACHE": str(cache)} | environment
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], env=clean, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_programs_are_kept_beside_the_models_for_processors_of_this_kind(tmp_path):
    folder, processor = ask(tmp_path).split()
    assert Path(folder) == tmp_path / "compiled" / processor
    kept = {path.name for path in Path(folder).glob("*-cache")}
    assert kept
    ask(tmp_path)
    assert {path.name for path in Path(folder).glob("*-cache")} == kept


@pytest.mark.parametrize(
    ("environment", "said"),
    [({"JAX_COMPILATION_CACHE_DIR": "elsewhere"}, "elsewhere"), ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None")],
)
def test_what_the_user_says_of_jax_cache_holds(tmp_path, monkeypatch, environment, said):
    monkeypatch.chdir(tmp_path)
    assert ask(tmp_path / "cache", **{"PYTHONPATH": str(Path(__file__).parents[2])} | environment).split()[0] == said
    assert not (tmp_path / "cache").exists()


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert ask(tmp_path / "file").split()[0] == "None"


def test_a_cache_that_is_set_already_stays():
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
