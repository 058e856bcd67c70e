"""Memory runs out in the middle of a run: it is said where, and what was saved is whole."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.config.schema import CheckpointSection
from burnish.observe.run_folder import RunFolder, read_status
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import make_learner


@pytest.fixture
def limit() -> Iterator[None]:
    """The soft limit on the address space is what it was, afterwards."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
def test_r57_an_allocation_that_fails_is_told_with_its_phase_and_the_checkpoint_is_whole(tmp_path: Path, limit: None) -> None:
    """The address space ends 256 MiB beyond what a warm run has, and the third update wants 1 GiB."""
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    learner = make_learner(tmp_path, training={"max_steps": 4})
    update = learner.cluster.update_actor

    def greedy(*micro_batches: Any, **options: Any) -> Any:
        if options["step"] == 3:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
            np.ones(1 << 30, np.uint8)
        return update(*micro_batches, **options)

    learner.cluster.update_actor = greedy  # type: ignore[method-assign]
    checkpoints = tmp_path / "runs" / "first" / "checkpoints"
    with pytest.raises(MemoryError), RunFolder(tmp_path / "runs", "first") as folder:
        folder.write_config("")
        learner.train(saver=Saver(checkpoints, CheckpointSection(every=1)))
    cause = read_status(tmp_path / "runs" / "first")["cause"]
    assert "Unable to allocate 1.00 GiB" in cause and cause.endswith("; in update, after step 2")
    assert store.newest_intact(checkpoints) in (1, 2)
