"""An environment's author needs no jax: neither the process that plays an episode nor the one in which the environment lives imports it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, pathlib, sys, tempfile
import burnish.agentic
from burnish.agentic.agents import ModelAgent
from burnish.agentic.calls import Calls
from burnish.agentic.trajectory import EpisodeContext, TrajectoryCollectEngine
from burnish.agentic.workers import WorkerPool
from burnish.rollout.scripted import ScriptedEngine
from burnish.testing.byte_tokenizer import make_byte_tokenizer
from burnish.text.codec import Codec
from burnish.types import SamplingParams
from tests.agentic.grid import MyEnv

codec = Codec.load(make_byte_tokenizer(pathlib.Path(tempfile.mkdtemp())))
moves = ["right", "RIGHT", " down "]
engine = ScriptedEngine(lambda request: [*codec.tokenizer.encode(moves[request.seed_path[-1]]), 2])
pool = WorkerPool(1)
context = EpisodeContext(engine, codec.template, codec.tokenizer.decode, context=1000, max_prompt_tokens=500, calls=Calls(pool))
collector = TrajectoryCollectEngine(context, params=SamplingParams(9, stop_ids=(2,)), seed_path=(0,))
got = asyncio.run(collector.collect(ModelAgent(), MyEnv({"map": ["SFF", "HHG"], "seed": 7}), group=(0, 0), sample=0))
assert got.status == "ok", got.error
assert [step.reward for step in got.steps] == [0.0, 0.0, 1.0] and got.steps[-1].done
assert got.messages[0]["content"].startswith("You are on this map:")
pool.close()
assert "jax" not in sys.modules and "gymnasium" in sys.modules
"""


def test_my_env_is_played_without_jax() -> None:
    pytest.importorskip("gymnasium")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
