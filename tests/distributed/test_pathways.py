"""What a process does whose devices are a Pathways proxy's: found by its configuration, never joined. A stand-in: no proxy is here."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest
from jax._src import distributed as jax_distributed

from burnish.config.errors import UserError
from burnish.config.schema import DistributedConfig
from burnish.rl.distributed import joined
from burnish.rl.fleet import ALONE

TARGET = "grpc://127.0.0.1:29000"


@pytest.fixture
def proxy() -> Iterator[None]:
    """As JAX_PLATFORMS and JAX_BACKEND_TARGET set it; this process has its devices already."""
    before = {"jax_platforms": jax.config.jax_platforms, "jax_backend_target": jax.config.read("jax_backend_target")}
    jax.devices()
    jax.config.update("jax_platforms", "proxy,cpu")
    jax.config.update("jax_backend_target", TARGET)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of a package that stands in for Google's."""
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "pathwaysutils", SimpleNamespace(initialize=lambda: calls.append("initialize")))
    return calls


def test_one_process_has_all_devices_and_joins_nobody(proxy: None, package: list[str]) -> None:
    for config in (None, DistributedConfig()):
        with joined(config) as fleet:
            assert fleet is ALONE
    assert jax_distributed.global_state.client is None and package == ["initialize"] * 2
    several = DistributedConfig(coordinator="node0:8476", num_processes=2, process_id=1)
    with pytest.raises(UserError, match=r"names 2 processes, but .* with Pathways one process\s+has all devices"), joined(several):
        pass


def test_what_is_missing_is_named(proxy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(UserError, match=rf"for the devices of {TARGET}, .*pip install pathwaysutils"), joined(None):
        pass
    jax.config.update("jax_backend_target", "")
    with pytest.raises(UserError, match="set JAX_BACKEND_TARGET"), joined(None):
        pass


def test_without_a_proxy_nothing_is_asked_of_it(package: list[str]) -> None:
    with joined(None) as fleet:
        assert fleet is ALONE
    assert package == []
