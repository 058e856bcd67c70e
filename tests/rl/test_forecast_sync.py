"""The bytes of a sync, told before there are weights, against what moves: counted at every transfer, and from index maps alone."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from burnish.config.schema import Config
from burnish.models.model import Model
from burnish.models.sharding import shardings
from burnish.models.transformer import spec
from burnish.rl.cluster import RLCluster
from burnish.rl.forecast.report import Forecast, planned
from burnish.rl.forecast.run import PlannedRun, declared
from burnish.rl.forecast.transfer import SyncForecast, sync_forecast
from burnish.rl.placement import Role
from burnish.sync.carry.offers import fetch
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.state import leaf_names
from tests.rollout.sglang_double import SglangDouble
from tests.rollout.vllm_double import Double, served

LORA: Any = {"rank": 2, "targets": ["q", "down"]}
CASES: dict[str, Any] = {
    "split": {"cluster": {"actor": {"axes": {"fsdp": 4}}, "rollout": {"axes": {"tp": 2}}}},
    "split, whole copies on both sides": {
        "cluster": {"actor": {"axes": {"data": 2, "fsdp": 2}}, "rollout": {"axes": {"data": 2, "tp": 2}}}
    },
    "same devices": {"cluster": {"actor": {"axes": {"fsdp": 4}}}},
    "equal meshes": {"cluster": {"actor": {"axes": {"data": 2, "tp": 2}}}},
    "an adapter": {"cluster": {"actor": {"axes": {"fsdp": 2}}, "rollout": {"devices": "6-7"}}, "model": {"lora": LORA}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, config=tiny_config("qwen3", width=16), alphabet="0123456789+")
    return folder


def plan(folder: Path, case: Any) -> PlannedRun:
    options = {"model": {"precision": "f32", **case.get("model", {}), "path": str(folder)}, "cluster": case.get("cluster", {})}
    rollout = {"slots": 4, **case.get("rollout", {})}
    run = planned(Forecast(), Config.model_validate({**options, "rollout": rollout}), base=folder, num_devices=8)
    assert run is not None
    return run


def loaded(run: PlannedRun) -> RLCluster:
    config = run.config
    options: dict[str, Any] = {"cluster": config.cluster, "rollout": config.rollout, "training": config.training}
    cluster = RLCluster(Model.load(config.model.path), lora=config.model.lora, precision=run.precision, **options)
    cluster.prepare(run.algorithm, total_updates=1)
    return cluster


def lacking(shape: tuple[int, ...], source: jax.sharding.Sharding, place: jax.sharding.Sharding) -> int:
    """Bytes of float32 that a leaf's new places don't hold yet, one number at a time: what no plan could do without."""
    held = source.devices_indices_map(shape)
    missing = 0
    for device, index in place.devices_indices_map(shape).items():
        needed = np.zeros(shape, bool)
        needed[index] = True
        if device in held:
            needed[held[device]] = False
        missing += int(needed.sum()) * 4
    return missing


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_every_link_are_those_of_a_sync(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan(folder, CASES[name])
    told = sync_forecast(run)
    cluster = loaded(run)
    moved: Counter[tuple[int, int]] = Counter()
    put = jax.device_put

    def counting(x: Any, device: Any = None, **options: Any) -> Any:
        if isinstance(device, jax.Device) and isinstance(x, jax.Array):
            (source,) = x.devices()
            if source != device:
                moved[source.id, device.id] += x.nbytes
        return put(x, device, **options)

    try:
        names = [name if cluster._base is None else f"adapter.{name}" for name in leaf_names(cluster.state.trainable)]
        places = cluster.engine._runner.layout.places  # type: ignore[attr-defined]
        leaves = jax.tree.leaves(cluster.state.trainable)
        missing = sum(lacking(leaf.shape, leaf.sharding, places[name]) for name, leaf in zip(names, leaves, strict=True))
        monkeypatch.setattr(jax, "device_put", counting)
        cluster.sync_weights()
    finally:
        cluster.close()
    assert told.links == dict(moved)
    assert told.total == missing and told.published == sum(leaf.nbytes for leaf in leaves)
    assert (told.total == 0) == (name == "equal meshes")


class ReadsVllm(Double):
    """Counts the bytes of what it is told to read."""

    taken = 0

    async def load(self, request: Request) -> Any:
        self.taken += stored((await request.json())["lora_path"])
        return await super().load(request)

    async def rpc(self, request: Request) -> Any:
        self.taken += stored((await request.json())["kwargs"]["weights_path"])
        return await super().rpc(request)


class ReadsSglang(SglangDouble):
    taken = 0

    async def update(self, request: Request) -> Any:
        self.taken += stored((await request.json())["model_path"])
        return await super().update(request)


class Fetches:
    """What `burnish serve --weights` documents of its routes; it fetches what it is offered, and samples nothing."""

    taken, edition, prepared = 0, "start", ""

    def app(self) -> Starlette:
        paths = [
            "/health",
            "/weights",
            "/inference/v1/generate",
            *(f"/weights/{verb}" for verb in ("fetch", "prepare", "activate", "drop")),
        ]
        return Starlette(routes=[Route(path, self.answer, methods=["GET", "POST"]) for path in paths])

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json() if request.method == "POST" else {}
        if request.url.path == "/weights/fetch":
            self.taken += fetch(body["offer"], within_s=30.0).nbytes
        elif request.url.path == "/weights/prepare":
            self.prepared = body["edition"]
        elif request.url.path == "/weights/activate":
            self.edition = body["edition"]
        choice = {"edition": self.edition, "token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}}
        return JSONResponse({"edition": self.edition, "prepared": self.prepared, "choices": [choice]})


def stored(folder: str) -> int:
    return sum(tensor.nbytes for file in Path(folder).glob("*.safetensors") for tensor in load_file(file).values())


ELSEWHERE: dict[str, tuple[type[Any], Any, str]] = {
    "vLLM reads an adapter": (
        ReadsVllm,
        {"model": {"lora": LORA}, "rollout": {"engine": "vllm"}},
        "read from a folder, the adapter in float32",
    ),
    "vLLM reads a merged model": (
        ReadsVllm,
        {"model": {"lora": LORA, "precision": "bf16"}, "rollout": {"engine": "vllm", "options": {"weights": "merged"}}},
        "read from a folder, the whole model in bfloat16",
    ),
    "SGLang reads a model": (ReadsSglang, {"rollout": {"engine": "sglang"}}, "read from a folder, the whole model in float32"),
    "burnish fetches an adapter": (
        Fetches,
        {"model": {"lora": LORA}, "rollout": {"engine": "burnish", "options": {"transport": "socket"}}},
        "by socket, from this host's memory, in float32",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_bytes_to_every_server_are_those_that_it_takes(folder: Path, name: str) -> None:
    kind, case, way = ELSEWHERE[name]
    servers = [kind(), kind()]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(server)) for server in servers]
        options = {**case["rollout"].get("options", {}), "urls": urls}
        run = plan(folder, {**case, "rollout": {**case["rollout"], "options": options}})
        told = sync_forecast(run)
        cluster = loaded(run)
        stack.callback(cluster.close)
        before = [server.taken for server in servers]
        cluster.sync_weights()
        taken = [server.taken - start for server, start in zip(servers, before, strict=True)]
        published = sum(leaf.nbytes for leaf in jax.tree.leaves(cluster.state.trainable))
    assert told.servers == dict(zip(urls, taken, strict=True)) and taken[0] > 0
    assert (told.links, told.total, told.published) == ({}, sum(taken), published)
    every, *each = told.text(rate=1.0).splitlines()
    assert every.startswith("all servers") and "2 of them" in every
    assert [(line.split()[0], line.endswith(way)) for line in each] == [(url, True) for url in urls]


def test_servers_that_a_run_will_start_and_engines_of_this_process_are_named(folder: Path) -> None:
    launched = sync_forecast(plan(folder, {"rollout": {"engine": "vllm", "options": {"launch": 2}}}))
    assert dict(launched.servers) == {"vllm 0": launched.published, "vllm 1": launched.published}
    own = sync_forecast(plan(folder, {"rollout": {"engine": "mine.py:Engine"}}))
    assert dict(own.servers) == {"mine.py:Engine": own.published} and own.text(rate=1.0).endswith("handed over in this process")


def test_the_busiest_link_and_device_and_their_seconds() -> None:
    told = SyncForecast({(0, 2): 3_000_000_000, (0, 3): 2_000_000_000, (1, 2): 1_000_000_000}, published=9)
    assert (told.total, told.busiest_link, told.busiest_device) == (6_000_000_000, 3_000_000_000, 5_000_000_000)
    total, link, device, speed = told.text(rate=1e10).splitlines()
    assert "5.59 GiB  3 of them" in total and "2.79 GiB  0.3 s" in link and "4.66 GiB  0.5 s" in device and "10 GB/s" in speed
    assert SyncForecast({}, published=2048).text(rate=1.0).startswith("Nothing crosses") and "2.00 KiB" in SyncForecast({}, 2048).text(
        rate=1.0
    )


def test_each_of_several_processes_lacks_what_its_own_engine_needs(folder: Path) -> None:
    two = {"cluster": {"actor": {"axes": {"data": 2, "fsdp": 4}}, "distributed": {"num_processes": 2}}}
    run = plan(folder, two)
    actor, rollout = run.placement[Role.ACTOR], run.placement[Role.ROLLOUT]
    assert (str(actor.place), str(rollout.place)) == ("0-3 of 2 processes (data 2, fsdp 4)", "0-3 (data 2, tp 2)")
    specs, missing = spec(run.models[Role.ACTOR]), 0
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    for mine in (jax.devices()[:4], jax.devices()[4:]):
        engine = Mesh(np.array(mine).reshape(2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
        for leaf, start, end in zip(
            declared(specs), jax.tree.leaves(shardings(specs, mesh)), jax.tree.leaves(shardings(specs, engine)), strict=True
        ):
            missing += lacking(leaf.shape, start, end)
    assert sync_forecast(run).total == missing > 0


def test_devices_that_processes_cannot_share_are_refused(folder: Path) -> None:
    found = Forecast()
    config = Config.model_validate({"model": {"path": str(folder)}, "cluster": {"distributed": {"num_processes": 3}}})
    assert planned(found, config, base=folder, num_devices=8) is None
    assert found.problems == ["3 processes (cluster.distributed.num_processes) can't share 8 devices evenly: plan for others"]
