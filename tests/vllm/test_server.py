"""The vLLM engine against a real server that burnish starts: conformance, GRPO with an adapter, a kill in mid-batch. `make test-vllm`.

On two quiet cores: an hour or so; BURNISH_VLLM_STEPS sets the steps of the run that must learn (40).
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.config.schema import LoraConfig
from burnish.models import lora, weights
from burnish.models.locate import locate
from burnish.rollout.remote.dialect import ServerSetup
from burnish.rollout.remote.editions import Kind
from burnish.rollout.remote.engine import Connections, RemoteEngine
from burnish.rollout.remote.lives import LifeLimits
from burnish.rollout.vllm import VllmDialect
from burnish.sync.folder import AdapterFolders, ModelFolders
from burnish.testing import check_engine
from burnish.testing.check_engine import CHECKS, Check, Subject
from burnish.text.codec import Codec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("BURNISH_VLLM_PYTHON", "")
STEPS = int(os.environ.get("BURNISH_VLLM_STEPS", "40"))
SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module", params=["adapter", "model"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Kind]]:
    """A float32 server, since the checks compare ids of requests that share a batch with those of one that runs alone."""
    kind: Kind = request.param
    folder = locate("smollm2-135m")
    setup = ServerSetup(
        folder,
        str,
        kind,
        context=1024,
        slots=8,
        max_kept=64,
        adapter_rank=8 if kind == "adapter" else None,
        dtype="float32",
        python=PYTHON,
        arguments=("--enforce-eager",),
        environment=SERVER,
    )
    limits = LifeLimits(restarts=0)
    logs = tmp_path_factory.mktemp("logs")
    engine = RemoteEngine(
        VllmDialect(setup),
        Connections(launch=1, slots=8, logs=logs),
        writer=writer(kind),
        decode_text=str,
        context=1024,
        start=folder,
        limits=limits,
    )
    try:
        asyncio.run(engine.generate(check_request()))
        host = engine._pool.hosts[0]
        assert host.url is not None
        yield host.url, kind
    finally:
        asyncio.run(engine.close())


def check_request() -> Any:
    from burnish.types import Request, SamplingParams

    return Request((1, 2, 3), SamplingParams(2))


def writer(kind: Kind) -> Any:
    folder = locate("smollm2-135m")
    config = weights.load_config(folder)
    if kind == "model":
        return ModelFolders(config, like=folder, dtype="float32")
    return AdapterFolders(config, lora.init_adapter(config, LoraConfig(rank=8), jax.random.key(0)), base=folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, server: tuple[str, Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    url, kind = server
    monkeypatch.setattr(check_engine, "PATIENCE_S", 900.0)  # two cores may be somebody else's too
    folder = locate("smollm2-135m")
    codec, config = Codec.load(folder), weights.load_config(folder)
    setup = ServerSetup(folder, codec.tokenizer.decode, kind, context=1024, slots=8, max_kept=64)
    engine = RemoteEngine(
        VllmDialect(setup),
        Connections([url], slots=8),
        writer=writer(kind),
        decode_text=setup.decode_text,
        context=1024,
        start=folder,
    )
    prompt = tuple(codec.template.encode([{"role": "user", "content": "Tell me a story."}]))
    if kind == "model":
        leaf: tuple[str, Any] = ("final_norm", np.full(config.width, 1.5, np.float32))
    else:
        leaf = ("adapter.q.b", np.full((config.num_layers, 8, config.num_heads * config.head_dim), 0.01, np.float32))
    asyncio.run(check_engine.run_check(check, Subject(engine, prompt, (5,) * 1100, leaf)))


def run(folder: Path, name: str, *changes: str) -> tuple[int, str]:
    """The quickstart's recipe with a server that burnish starts; the exit code and all that it said."""
    options = {"python": PYTHON, "arguments": ["--enforce-eager"], "environment": SERVER, "restarts": 1}
    command = [sys.executable, "-m", "burnish", "train", str(ROOT / "recipes" / "quickstart.yaml"), f"run.folder={folder}"]
    command += [f"run.name={name}", "rollout.engine=vllm", f"rollout.options={json.dumps(options)}", *changes]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout + done.stderr


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SMALL = ("training.batch_size=2", "training.train_micro_batch_size=null", "algorithm.num_generations=4", "training.compare=false")


def test_it_learns_in_bf16_as_close_to_the_sampler_as_the_native_engine(tmp_path: Path) -> None:
    """The quickstart in bf16: each step's ids are its version's, and trainer and server agree on their log-probs."""
    code, said = run(tmp_path, "learns", f"training.max_steps={STEPS}", "model.precision=bf16", "training.compare=false", "data.eval=[]")
    assert code == 0, said
    steps = [line["metrics"] for line in metrics(tmp_path / "learns")]
    apart = [step["mismatch/mean"] for step in steps]
    rewards = [step["reward/mean"] for step in steps]
    print(f"{STEPS} steps: reward {rewards}, mean |difference of log-probs| {apart}")
    assert max(apart) < 0.02 and all(step["staleness/max"] == 0 for step in steps)
    assert STEPS < 20 or np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


@pytest.mark.parametrize("kills", [1, 2])
def test_a_server_killed_in_mid_batch(tmp_path: Path, kills: int) -> None:
    """Once: restarted, its weights pushed again, the batch done, the run completes. More often than it may: it ends and says why."""
    import threading

    log = tmp_path / "killed" / "servers" / "vllm-0.log"
    done = threading.Event()

    def kill() -> None:
        for count in range(1, kills + 1):
            while not done.is_set() and (not log.is_file() or log.read_text().count("/v1/load_lora_adapter") < count + 1):
                time.sleep(0.2)
            time.sleep(2.0)
            found = subprocess.run(["pgrep", "-f", f"{PYTHON} -m vllm.entrypoints.openai.api_server"], capture_output=True, text=True)
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    code, said = run(tmp_path, "killed", "training.max_steps=4", "data.eval=[]", *SMALL)
    done.set()
    if kills == 1:
        assert code == 0, said
        assert "is lost (1 of 1): the server was killed by SIGKILL" in said and len(metrics(tmp_path / "killed")) == 4
    else:
        assert code == 1 and "failed 2 times and may be brought back 1 times: the server was killed by SIGKILL" in said, said
