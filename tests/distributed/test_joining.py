"""How processes are joined, where their roles go, and what a process does whose main thread can't hear that another is gone."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import ValidationError

from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, DistributedConfig
from burnish.rl.cluster import RLCluster
from burnish.rl.distributed import arguments, joined
from burnish.rl.fleet import ALONE
from burnish.rl.placement import Place, Role, placement
from burnish.sync.reshard import _innermost_cut, _relaid, on_host, whole_here
from burnish.testing.tiny import tiny_config
from tests.distributed.processes import LIMIT_S, finish, free_port, start

BOTH: dict[str, Any] = {"coordinator": "node0:1", "num_processes": 2, "process_id": 1}


def test_what_jax_is_asked_for() -> None:
    assert arguments(DistributedConfig(**BOTH, heartbeat_timeout_s=30)) == {
        "coordinator_address": "node0:1",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
        "heartbeat_timeout_seconds": 60,
        "shutdown_timeout_seconds": 30,
    }
    assert "cluster_detection_method" not in arguments(DistributedConfig(coordinator="node0:1")), "a launcher says the rest"
    with pytest.raises(ValidationError, match="`process_id` is 2, but of 2 processes the last is 1"):
        DistributedConfig(num_processes=2, process_id=2)


def test_without_others_a_run_is_alone() -> None:
    with joined(None) as fleet:
        assert fleet is ALONE and fleet.leads and fleet.count == 1
    with pytest.raises(UserError, match="cluster.distributed names other processes: join them"):
        RLCluster("nowhere", cluster=ClusterConfig(distributed=DistributedConfig(**BOTH)))


def places(config: dict[str, Any], **options: Any) -> dict[Role, Place]:
    found = placement(ClusterConfig.model_validate(config), num_devices=4, model=tiny_config(), num_processes=2, **options)
    return {role: placed.place for role, placed in found.roles.items()}


def test_roles_of_all_processes_and_roles_of_each() -> None:
    everything: dict[str, Any] = {"critic": tiny_config(), "reward": tiny_config(), "needs_reference": True}
    found = places({"actor": {"axes": {"fsdp": 4, "tp": 2}}}, **everything)
    whole = Place((0, 1, 2, 3), (("fsdp", 4), ("tp", 2)), processes=2)
    assert found[Role.ACTOR] == found[Role.CRITIC] == found[Role.REFERENCE] == whole and whole.rows == 4
    assert str(whole) == "0-3 of 2 processes (fsdp 4, tp 2)"
    assert found[Role.ROLLOUT] == Place((0, 1, 2, 3), (("data", 2), ("tp", 2))), "an engine is its process's own"
    assert found[Role.REWARD] == Place((0, 1, 2, 3), (("data", 4),))
    assert places({})[Role.ACTOR] == Place((0,), (("data", 2),), processes=2) and places({})[Role.ROLLOUT] == Place((0,))
    apart = places({"actor": {"devices": "1-2"}, "rollout": {"devices": [0], "axes": {"tp": 1}}})
    assert apart == {Role.ACTOR: Place((1, 2), (("data", 4),), processes=2), Role.ROLLOUT: Place((0,))}
    sizes = placement(ClusterConfig.model_validate({"actor": {"axes": {"fsdp": 4}}}), num_devices=4, model=tiny_config(), num_processes=2)
    one = placement(ClusterConfig.model_validate({"actor": {"axes": {"fsdp": 4}}}), num_devices=4, model=tiny_config())
    assert sizes[Role.ACTOR].total_bytes == one[Role.ACTOR].total_bytes == 4 * one[Role.ACTOR].bytes_per_device


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actor": {"axes": {"fsdp": 3}}}, "cluster.actor.axes {'fsdp': 3} are 3 devices, which 2 processes can't give in equal parts"),
        ({"actor": {"axes": {"fsdp": 16}}}, "cluster.actor.axes {'fsdp': 16} needs 8 devices, this process has 4"),
        ({"actor": {"axes": {"fsdp": 2}, "devices": "0-1"}}, "axes are those of a mesh over all of them, devices those of each"),
        ({"reference": {"devices": [3]}}, "cluster.reference has devices of its own, but in a run of 2 processes it is on the actor's"),
    ],
)
def test_meshes_that_several_processes_cannot_have_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        places(config, needs_reference=True)


def test_no_device_gets_a_whole_array_on_the_way_to_its_process() -> None:
    """As two processes with four devices each would: no instruction of the program makes anything as large as the array."""
    devices = np.array(jax.devices())
    shape = (16, 24)
    for axes, spec in (({"fsdp": 8}, ("fsdp",)), ({"fsdp": 8}, (None, "fsdp")), ({"fsdp": 2, "tp": 4}, ("tp", "fsdp"))):
        where = NamedSharding(Mesh(devices.reshape([*axes.values()]), tuple(axes)), PartitionSpec(*spec))
        dimension = _innermost_cut(where)
        target = NamedSharding(Mesh(devices.reshape(2, 4), ("process", "local")), PartitionSpec(*(None,) * dimension, "local"))
        array = jax.device_put(np.arange(384.0, dtype=np.float32).reshape(shape), where)
        program = _relaid(target).lower(array).compile().as_text()  # type: ignore[attr-defined]
        sizes = [np.prod([int(n) for n in found.split(",")]) for found in re.findall(r"f32\[([\d,]+)\]", program)]
        assert max(sizes) * 4 == np.prod(shape), (axes, spec, program)
        np.testing.assert_array_equal(np.asarray(_relaid(target)(array)), np.arange(384.0).reshape(shape))
    assert _innermost_cut(where) == 0, "tp is inside a process: what it cuts stays cut"
    assert whole_here(array) is array and on_host(np.ones(2)).tolist() == [1, 1]


STUCK = """
import os, signal, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from burnish.config.schema import DistributedConfig
from burnish.rl.distributed import joined
from burnish.sync.reshard import from_host, on_host

index, port, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
config = DistributedConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index, heartbeat_timeout_s=limit)
with joined(config) as fleet:
    fleet.on_leaving(lambda code, cause: print("last words:", code, flush=True))
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    print(on_host(from_host(np.arange(4.0), rows)).tolist(), flush=True)
    if index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    on_host(from_host(np.arange(8.0), rows))
"""


@pytest.mark.slow
def test_a_process_that_is_stuck_in_a_collective_leaves_within_the_limit() -> None:
    """The other is frozen, so its connections stay open and the collective never returns."""
    port = free_port()
    frozen = start(["-c", STUCK, "1", str(port), str(LIMIT_S)])
    [(code, out, err)] = finish([start(["-c", STUCK, "0", str(port), str(LIMIT_S)])])
    frozen.kill()
    finish([frozen])
    assert "[0.0, 1.0, 2.0, 3.0]" in out and out.splitlines()[-1] == "last words: 1"
    assert code == 1 and "error: process 1 of 2 is gone (no word for" in err


THREE = """
import os, signal, sys
from burnish.config.schema import DistributedConfig
from burnish.rl.distributed import joined
from burnish.rl.fleet import all_say

index, port, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with joined(DistributedConfig(coordinator=f"127.0.0.1:{port}", num_processes=3, process_id=index, heartbeat_timeout_s=limit)) as fleet:
    all_say(fleet, "t", index)
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    all_say(fleet, "t", index)
"""


@pytest.mark.slow
def test_the_first_process_goes_last_of_those_that_have_lost_one() -> None:
    """Else jax would end the others before they have said why."""
    port = free_port()
    *left, _ = finish([start(["-c", THREE, str(index), str(port), str(LIMIT_S)]) for index in range(3)])
    for code, _, err in left:
        assert code == 1 and "PeerLost: process 2 of 3 is gone (no word for" in err and "fatal errors" not in err, err


@pytest.mark.slow
def test_processes_that_were_asked_for_different_runs_refuse_to_begin(tmp_path: Any) -> None:
    port = free_port()

    def command(index: int) -> list[str]:
        keys = [f"coordinator=127.0.0.1:{port}", "num_processes=2", f"process_id={index}", f"heartbeat_timeout_s={LIMIT_S}"]
        where = [f"run.folder={tmp_path}", f"run.seed={index}"]
        return ["-m", "burnish", "train", *where, *(f"cluster.distributed.{key}" for key in keys)]

    for code, _, err in finish([start(command(0)), start(command(1))]):
        assert code == 1 and "error: the processes of this run have different configurations" in err, err
    assert not [*tmp_path.iterdir()]
