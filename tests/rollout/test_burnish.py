"""A trainer's weights in an engine of another process: `burnish serve --weights` in a process of its own, by both ways of carrying.

What it samples is compared bit by bit with the native engine's in this process.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.schema import LoraConfig, RolloutConfig
from burnish.models import transformer
from burnish.models.model import Model
from burnish.rl.cluster import RLCluster
from burnish.rollout import burnish as spoken
from burnish.rollout.burnish import BurnishDialect
from burnish.rollout.native.engine import NativeEngine
from burnish.rollout.remote.dialect import ServerSetup
from burnish.rollout.remote.engine import Connections, RemoteEngine
from burnish.rollout.remote.lives import LifeLimits, ServerFailed
from burnish.rollout.remote.process import ServerProcess, free_port
from burnish.rollout.scripted import ScriptedEngine
from burnish.rollout.server.app import make_app
from burnish.rollout.server.listen import Guards, listening
from burnish.sync.carry.offers import CarryError, Offer, Way, fetch
from burnish.sync.checksum import checksum
from burnish.sync.depot import Depot
from burnish.sync.folder import ModelFolders
from burnish.testing.check_engine import CHECKS, Check, Subject, run_check
from burnish.testing.tiny import write_tiny_model
from burnish.train.state import leaf_names
from burnish.types import Completion, Request, SamplingParams
from tests.rl.runs import RecordingCluster, make_learner

CONTEXT, SLOTS = 64, 4
TOKEN = secrets.token_urlsafe()
WAYS: tuple[Way, ...] = ("transfer", "socket")
LIMITS = LifeLimits(restarts=0, start_timeout_s=90.0)
PROMPT = (5, 6, 7)
LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))


class Broken(Depot):
    """Offers one array by a key that nobody holds."""

    bad = ""

    def offer(self, folder: Path, name: str) -> Offer:
        offer = super().offer(folder, name)
        return {**offer, "key": str(secrets.randbits(62)).zfill(43)} if name == self.bad else offer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, scale=5.0)
    return Model.load(folder)


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in another process."""
    port = free_port()
    command, environment = dialect(model, offers=None).command(port, 0)
    process = ServerProcess(command, environment=environment, log=tmp_path_factory.mktemp("server") / "log")
    try:
        wait_until(lambda: is_up(port) or process.ending is not None, within_s=90)
        assert process.ending is None, process.last_words(20)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def is_up(port: int) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    return False


def wait_until(ready: Callable[[], bool], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, "it didn't come"
        time.sleep(0.05)


def dialect(model: Model, offers: Any, *, fetch_s: float = 60.0) -> BurnishDialect:
    setup = ServerSetup(
        model.folder, model.codec.tokenizer.decode, "model", context=CONTEXT, slots=SLOTS, token=TOKEN, python=sys.executable
    )
    return BurnishDialect(setup, offers, fetch_s)


Make = Callable[..., tuple[RemoteEngine, Depot]]


@pytest.fixture
def make(model: Model) -> Iterator[Make]:
    """An engine over a server, and its depot."""
    with contextlib.ExitStack() as stack:

        def engine(
            url: str,
            way: Way = "socket",
            *,
            kind: type[Depot] = Depot,
            scale: float | None = None,
            check: Callable[[str, Any], None] | None = None,
            token: str = TOKEN,
            **options: Any,
        ) -> tuple[RemoteEngine, Depot]:
            check = check or ModelFolders(model.config, like=model.folder, dtype="float32").check
            depot = kind(check, scale=scale, way=way, host="127.0.0.1")
            made = RemoteEngine(
                dialect(model, depot, **options),
                Connections([url], token=token, slots=SLOTS),
                writer=depot,
                decode_text=model.codec.tokenizer.decode,
                context=CONTEXT,
                start=model.folder,
                limits=LIMITS,
            )
            stack.callback(lambda: asyncio.run(made.close()))
            return made, depot

        yield engine


def named(params: transformer.Params, prefix: str = "") -> dict[str, Any]:
    return {prefix + name: leaf for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True)}


def moved(params: transformer.Params, seed: int) -> transformer.Params:
    """Other weights: every leaf is."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params)


async def push(engine: RemoteEngine, version: int, leaves: Mapping[str, Any], sent: int | None = None) -> None:
    await engine.begin_update(version)
    for name, leaf in leaves.items():
        await engine.push(name, leaf)
    await engine.commit_update(checksum(leaves) if sent is None else sent)


REQUESTS = (
    Request(PROMPT, SamplingParams(8), (1, 2, 3)),
    Request(PROMPT, SamplingParams(8, temperature=0.0), (4,)),
    Request((9, 8), SamplingParams(8, top_k=3), (2**40, 5)),
)


async def answers(engine: Any) -> list[Completion]:
    return list(await asyncio.gather(*map(engine.generate, REQUESTS)))


def here(model: Model, params: transformer.Params, adapter: transformer.Adapter | None = None) -> list[Completion]:
    """What the native engine says in this process."""

    async def story() -> list[Completion]:
        decode = model.codec.tokenizer.decode
        engine = NativeEngine(model.config, params, adapter=adapter, decode_text=decode, context=CONTEXT, slots=SLOTS)
        try:
            return await answers(engine)
        finally:
            await engine.close()

    return asyncio.run(story())


def assert_same(found: list[Completion], expected: list[Completion], version: int) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.stop == other.stop and one.support == other.support
        np.testing.assert_array_equal(one.logps, other.logps)
        assert (one.kept_ids is None) == (other.kept_ids is None) and set(one.versions.tolist()) == {version}
        if one.kept_ids is not None and other.kept_ids is not None:
            np.testing.assert_array_equal(one.kept_ids, other.kept_ids)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, server: str, make: Make, model: Model) -> None:
    engine, _ = make(server)
    leaf = ("final_norm", np.ones(model.config.width, np.float32))
    asyncio.run(run_check(check, Subject(engine, PROMPT, tuple(range(CONTEXT)), leaf)))


@pytest.mark.parametrize("way", WAYS)
def test_weights_reach_another_process_bit_by_bit(way: Way, server: str, make: Make, model: Model) -> None:
    engine, _ = make(server, way)
    one, two = moved(model.params, 1), moved(model.params, 2)
    assert_same(asyncio.run(answers(engine)), here(model, model.params), 0)
    asyncio.run(push(engine, 3, named(one)))
    assert engine.version == 3
    first = here(model, one)
    assert_same(asyncio.run(answers(engine)), first, 3)
    asyncio.run(push(engine, 4, named(two)))
    second = asyncio.run(answers(engine))
    assert_same(second, here(model, two), 4)
    assert second[0].ids.tolist() != first[0].ids.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_push_that_fails_half_way_leaves_the_old_version(way: Way, server: str, make: Make, model: Model) -> None:
    engine, depot = make(server, way, kind=Broken, fetch_s=5.0 if way == "transfer" else 60.0)
    assert isinstance(depot, Broken)
    good, bad = named(moved(model.params, 1)), named(moved(model.params, 2))
    asyncio.run(push(engine, 1, good))
    before = asyncio.run(answers(engine))
    depot.bad = list(bad)[len(bad) // 2]
    said = {"transfer": "nothing came from 127.0.0.1:.* within 5 s", "socket": "127.0.0.1:.* refuses this array"}[way]
    with pytest.raises(RuntimeError, match=rf"doesn't take version 2, version 1 stays: .*{depot.bad} of .*{said}"):
        asyncio.run(push(engine, 2, bad))
    assert engine.version == 1
    assert_same(asyncio.run(answers(engine)), before, 1)
    depot.bad = ""
    asyncio.run(push(engine, 2, bad))
    assert_same(asyncio.run(answers(engine)), here(model, moved(model.params, 2)), 2)


def test_what_is_not_what_was_sent_is_refused_by_both_sides(server: str, make: Make, model: Model) -> None:
    class Lying(Depot):
        def checksum(self, folder: Path) -> int:
            return super().checksum(folder) ^ 1

    engine, _ = make(server, kind=Lying)
    leaves = named(moved(model.params, 1))
    with pytest.raises(RuntimeError, match=r"what came has the checksum \d+ and was sent with 5: the old weights stay"):
        asyncio.run(push(engine, 1, leaves, sent=5))
    with pytest.raises(RuntimeError, match=rf"version 0 stays: .*what came of .*, {len(leaves)} arrays, has the checksum"):
        asyncio.run(push(engine, 1, leaves))
    assert_same(asyncio.run(answers(engine)), here(model, model.params), 0)


def test_a_wrong_token_is_refused(server: str, make: Make) -> None:
    engine, _ = make(server, token="guessed")
    with pytest.raises(ServerFailed, match=rf"{server} can't be used: .*a token is needed"):
        asyncio.run(engine.generate(REQUESTS[0]))
    body = {"edition": "mine", "version": 9}
    assert httpx2.post(f"{server}/weights/activate", json=body).status_code == 401
    said = httpx2.post(f"{server}/weights/activate", json=body, headers={"authorization": f"Bearer {TOKEN}"})
    assert said.status_code == 409 and "isn't prepared here" in said.text


@pytest.mark.parametrize("way", WAYS)
def test_an_offer_that_nobody_fetches_ends_within_its_time(way: Way, make: Make, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has stopped fetching: the trainer names it, and lets go of what it offered."""
    monkeypatch.setattr(spoken, "GRACE_S", 0.1)
    offered: list[Offer] = []

    class Stuck:
        edition, prepared = "start", None

        async def fetch(self, edition: str, leaf: str, offer: Mapping[str, Any], within_s: float) -> None:
            offered.append(offer)
            await asyncio.sleep(60)

        async def prepare(self, edition: str, checksum: int, scale: float | None) -> None: ...

        async def activate(self, edition: str, version: int) -> None: ...

        async def drop(self, edition: str) -> None: ...

    async def story() -> None:
        codec = model.codec
        says = ScriptedEngine(lambda request: [7] * 8, decode_text=codec.tokenizer.decode, context=CONTEXT)
        async with listening(make_app(Plain(says), Stuck()), Guards(TOKEN)) as (host, port):
            url = f"http://{host}:{port}"
            engine, _ = await asyncio.to_thread(make, url, way, fetch_s=0.5)
            with pytest.raises(ServerFailed, match=rf"{url} failed 1 times .*/weights/fetch: ReadTimeout"):
                await push(engine, 1, named(moved(model.params, 1)))
            await engine.close()

    asyncio.run(story())
    assert len(offered) == 1
    with pytest.raises(CarryError):  # it is taken back
        fetch(offered[0], within_s=0.3)


class Plain:
    """A backend without sessions."""

    model = "plain"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    decode = chat = finish = encode  # type: ignore[assignment]

    async def sample(self, prompt_ids: Any, params: SamplingParams, seed_path: Any) -> Completion:
        return await self._engine.generate(Request(tuple(prompt_ids), params, tuple(seed_path)))


def run_of(model: Model, logs: Path, **options: Any) -> tuple[RLCluster, RemoteEngine]:
    """A run that trains an adapter, with this engine."""
    rollout = RolloutConfig(engine="burnish", options={"transport": "socket", **options}, max_prompt_tokens=48, slots=SLOTS)
    cluster = RLCluster(model, lora=LORA, precision="f32", rollout=rollout, logs=logs)
    assert isinstance(cluster.engine, RemoteEngine)
    return cluster, cluster.engine


def some_adapter(cluster: RLCluster) -> transformer.Adapter:
    assert cluster._first is not None
    return transformer.Adapter(moved(cluster._first, 3), LORA.scale)


def test_a_run_ships_its_adapter(server: str, model: Model, tmp_path: Path) -> None:
    cluster, engine = run_of(model, tmp_path, urls=[server], token=TOKEN)
    try:
        adapter = some_adapter(cluster)
        asyncio.run(push(engine, 1, named(adapter.pairs, "adapter.")))
        for one, other in zip(asyncio.run(answers(engine)), here(model, model.params, adapter), strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)  # merged in another program
    finally:
        cluster.close()


@pytest.mark.soak
def test_a_server_that_a_run_has_started_is_started_again_with_its_weights(model: Model, tmp_path: Path) -> None:
    cluster, engine = run_of(model, tmp_path)
    try:
        asyncio.run(push(engine, 1, named(some_adapter(cluster).pairs, "adapter.")))
        before = asyncio.run(answers(engine))
        (host,) = engine._pool.hosts
        assert host.process is not None
        os.kill(host.process.pid, signal.SIGKILL)
        assert_same(asyncio.run(answers(engine)), before, 1)
        assert host.deaths == 1
    finally:
        cluster.close()


@pytest.mark.soak
def test_a_run_whose_engine_is_elsewhere_learns_what_it_would_learn_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same updates, bit by bit: what is sampled is the same, from weights that went to another process after each step."""
    monkeypatch.chdir(tmp_path)  # the server's log
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_model(folder, scale=5.0)
    found = []
    elsewhere = {"engine": "burnish", "options": {"environment": {"PYTHONPATH": str(Path(__file__).parents[2])}}}
    for engine in ({"engine": "native"}, elsewhere):
        options = {**engine, "max_prompt_tokens": 30}
        learner = make_learner(folder, rollout=options, cluster={"canary": True}, training={"max_steps": 3})
        learner.train()
        assert isinstance(learner.cluster, RecordingCluster)
        found.append((learner.cluster.means("policy/loss"), learner.cluster.means("optim/grad_norm")))
        assert max(learner.cluster.worst_mismatch) < 1e-5
    assert found[0] == found[1] and any(found[0][1])
