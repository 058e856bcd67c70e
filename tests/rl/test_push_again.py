"""A push of weights that fails is made again, and changes nothing."""

import logging
from pathlib import Path

import pytest

from burnish import faults
from burnish.models.model import Model
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import assert_same, host, make_learner

ONCE = "engine.push@leaf=embed@version=1@p=.5:raise"
SEED = 4
"""With it the first push of version 1 is struck and the second isn't."""


@pytest.mark.slow
@pytest.mark.optimised
def test_r30_a_push_that_fails_once_costs_a_warning_and_one_that_always_fails_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    model = Model.load(tmp_path)
    whole = make_learner(model)
    whole.train()
    struck = make_learner(model)
    with faults.armed(ONCE, seed=SEED), caplog.at_level(logging.WARNING):
        assert struck.train().steps == 2
        assert faults.fired() == {"engine.push": 1}
    assert len([r for r in caplog.records if "the push of version 1 failed and is made again: InjectedFault" in r.message]) == 1
    assert_same(host(struck.cluster.state), host(whole.cluster.state))
    lost = make_learner(model)
    with faults.armed("engine.push@leaf=embed@version=1:raise"), pytest.raises(faults.InjectedFault):
        lost.train()
