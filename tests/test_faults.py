"""`faults.point`: off by default, strikes by identity, and what struck can be counted."""

import subprocess
import sys
import time

import pytest

from burnish import faults


def test_off_by_default_and_cheap() -> None:
    before = faults.fired()
    start = time.process_time()
    for step in range(100_000):
        assert faults.point("save.after_arrays", step=step) is False
    assert (time.process_time() - start) / 100_000 < 5e-6
    assert faults.fired() == before


def test_raises_where_every_condition_holds(capfd: pytest.CaptureFixture[str]) -> None:
    with faults.armed("save@step=5@part=b:raise"):
        assert not faults.point("save", step=5, part="a")
        assert not faults.point("save", step=4, part="b")
        assert not faults.point("save", part="b")
        assert not faults.point("load", step=5, part="b")
        with pytest.raises(faults.InjectedFault, match="injected at save part=b step=5"):
            faults.point("save", step=5, part="b")
        assert faults.fired() == {"save": 1}
    assert capfd.readouterr().err == "burnish fault: raise at save part=b step=5\n"
    assert faults.point("save", step=5, part="b") is False


def test_flag_tells_the_caller() -> None:
    with faults.armed("sync.skip@version=2:flag, sync.skip@version=4:flag"):
        assert [faults.point("sync.skip", version=v) for v in range(5)] == [False, False, True, False, True]


def struck(spec: str, order: list[int], seed: int = 0) -> set[int]:
    with faults.armed(spec, seed=seed):
        return {i for i in order if faults.point("env.step", sample=i)}


def test_probability_depends_on_identity_not_on_order() -> None:
    forward = struck("env.step@p=.1:flag", list(range(2000)))
    assert forward == struck("env.step@p=.1:flag", list(range(1999, -1, -1)))
    assert 150 < len(forward) < 250
    assert forward != struck("env.step@p=.1:flag", list(range(2000)), seed=1)
    assert struck("env.step@p=0:flag", list(range(100))) == set()
    assert struck("env.step@p=1:flag", list(range(100))) == set(range(100))


def test_probability_draws_again_for_a_retry() -> None:
    with faults.armed("env.step@p=.5:flag"):
        draws = [faults.point("env.step", sample=7) for _ in range(200)]
    assert 70 < sum(draws) < 130


@pytest.mark.parametrize("spec", ["save", "save:explode", "@step=1:raise", "save@step:raise", "save@p=2:raise", "save@p=often:raise"])
def test_unreadable_rules_are_named(spec: str) -> None:
    with pytest.raises(ValueError, match="fault rule"):
        faults.parse(spec)


def run_child(action: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    code = "from burnish import faults\nfor step in range(9): print(step, flush=True); faults.point('save', step=step)"
    env = {"BURNISH_FAULTS": f"save@step=2:{action}", "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout_s)


def test_environment_arms_a_process_and_kill_is_logged_first() -> None:
    child = run_child("kill", 30)
    assert child.returncode == -9
    assert child.stdout.split() == ["0", "1", "2"]
    assert child.stderr == "burnish fault: kill at save step=2\n"


def test_hang_hangs() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_child("hang", 1.5)
    assert (caught.value.stdout or b"").split() == [b"0", b"1", b"2"]
