"""Every option does something (B127): each is given another valid value, and the run that comes of it must be another.

A field of any section, of every algorithm's branch, of optional sections and of list items is found by itself; what isn't an obvious value
of its type stands in `OTHER`, what must hold for it to matter in `WHERE`. An error counts as an effect, silence doesn't.
"""

import contextlib
import copy
import functools
import io
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from burnish.agentic.ray_workers import arguments as ray_arguments
from burnish.cli.main import main
from burnish.config.algorithms import TeacherConfig
from burnish.config.reference import ALGORITHMS, sections
from burnish.config.schema import Config
from burnish.rl.distributed import arguments
from tests.config.resolved_run import left_behind, observe, observe_algorithm, program, slope, write_task

pytestmark = pytest.mark.slow  # 130 small runs are built, and a few made

ALLOWED = {
    "observe.progress": "only a terminal shows it: tests/observe/test_display.py",
}
"""Fields without an effect that this test could see, each with its reason; at most 5."""

SAME = {
    "model.precision": ["auto"],  # f32 on this machine
    "training.remat": [True],  # what auto comes to where every weight is trained
}
"""Other values that mean the same as the value in the run at hand."""

OTHER: dict[str, list[Any]] = {
    "model.path": ["other"],
    "model.lora.targets": [["q"]],
    "model.lora.path": ["adapter"],
    "data.train": [[{"path": "more.jsonl"}]],
    "data.train.0.path": ["eval.jsonl"],
    "data.train.0.recipe": ["mine.py:more"],
    "data.train.0.options": [{"size": 5}],
    "data.eval": [[]],
    "data.eval.0.path": ["other_eval.jsonl"],
    "data.eval.0.recipe": ["mine.py:more"],
    "data.eval.0.options": [{"size": 5}],
    "data.eval.0.weight": [2.0],
    "data.prompt_key": ["question"],
    "data.system_prompt": ["99"],
    "data.chat_template_kwargs": [{"hint": "77"}],
    "rewards": [[{"fn": "exact"}]],
    "rewards.0.fn": ["./mine.py:lengths"],
    "rewards.0.options": [{"factor": 3.0}],
    "reward_model": [{"path": "judge"}],
    "reward_model.path": ["other_judge"],
    "environment.env": ["./mine.py:Env"],
    "environment.options": [{"max_steps": 3}],
    "environment.ray": [{}],
    "agent.agent": ["./mine.py:Agent"],
    "agent.options": [{"system_prompt": "88"}],
    "rollout.engine": ["scripted"],
    "rollout.options": [{"reply": "./mine.py:says_else"}],
    "rollout.sampling.stop_strings": [["7"]],
    "rollout.max_episode_tokens": [40],
    "rollout.kv_cache_bytes": [1_000_000],
    "rollout.replay": ["nowhere"],
    "cluster.actor.axes": [{"data": 2}, {"fsdp": 2}, {"tp": 2}],
    "cluster.actor.devices": [[3], 2],
    "cluster.offload_to_cpu": [["actor"]],
    **{f"cluster.{role}.axes": [{"fsdp": 2}] for role in ("rollout", "reference", "critic", "reward", "teacher")},
    **{f"cluster.{role}.devices": [[4, 6], "6-7", 2] for role in ("rollout", "reference", "critic", "reward", "teacher")},
    "training.mini_batch_size": [2],
    "training.train_micro_batch_size": [2],
    "training.tokens_per_device": [64],
    "training.rollout_micro_batch_size": [2],
    "training.compute_logps_micro_batch_size": [1, 4],
    "algorithm.advantage": [{"fn": "./mine.py:advantage"}],
    "algorithm.advantage.fn": ["./mine.py:other_advantage"],
    "algorithm.advantage.options": [{"factor": 3.0}],
    "algorithm.loss": [{"fn": "./mine.py:loss"}],
    "algorithm.loss.fn": ["./mine.py:other_loss"],
    "algorithm.loss.options": [{"factor": 3.0}],
    "algorithm.critic.path": ["judge"],
    "algorithm.teacher.path": ["other"],
    "run.folder": ["elsewhere"],
    "checkpoint.every": [1],
    "checkpoint.every_minutes": [1e-9],
    "checkpoint.keep_last": [1],
    "checkpoint.keep_every": [1],
    "checkpoint.keep_best": [{"metric": "reward/mean", "count": 2}],
    "checkpoint.keep_best.metric": ["nowhere"],
    "checkpoint.keep_best.count": [1],
    "observe.sample_every": [1],
    "observe.trace_mib": [0],
    "observe.profile": ["1-1"],
    "observe.trackers": [["tensorboard"]],
    "observe.transcript_tokens": [0],
    "training.eval_every": [1],
    "training.head_chunk": [8],
    "training.balance": [0.5],
    "training.max_nonfinite_updates": [1],
}
BY_JOINING = "cluster.distributed."
"""Fields whose effect is how processes are joined; what that comes to: tests/distributed."""
BY_RAY = "environment.ray."
"""Fields whose effect is what Ray is asked for; with Ray: `make test-ray`."""

JUDGE = {"path": "judge"}
DISTILLS: dict[str, Any] = {"algorithm.name": "on_policy_distillation", "algorithm.teacher": {"path": "model"}}
BEST = {"metric": "reward/mean", "mode": "max"}
WHERE: dict[str, dict[str, Any]] = {
    "model.lora.": {"model.lora": {"rank": 2}},
    "data.train.0.recipe": {"data.train.0.path": None, "data.train.0.recipe": "mine.py"},
    "data.train.0.options": {"data.train.0.path": None, "data.train.0.recipe": "mine.py"},
    "data.eval.0.recipe": {"data.eval.0.path": None, "data.eval.0.recipe": "mine.py"},
    "data.eval.0.options": {"data.eval.0.path": None, "data.eval.0.recipe": "mine.py"},
    "reward_model.": {"reward_model": JUDGE},
    BY_JOINING: {"cluster.distributed": {"coordinator": "node0:8476", "num_processes": 2, "process_id": 0}},
    BY_RAY: {"environment.ray": {}},
    "rollout.options": {"rollout.engine": "scripted", "rollout.options": {"reply": "./mine.py:says"}},
    "cluster.rollout.": {"cluster.rollout": {"devices": [4, 5]}},
    "cluster.reference.": {"cluster.reference": {"devices": [4, 5]}},
    "cluster.critic": {"algorithm.name": "ppo"},
    "cluster.critic.": {"algorithm.name": "ppo", "cluster.critic": {"devices": [4, 5]}},
    "cluster.reward": {"reward_model": JUDGE},
    "cluster.teacher": DISTILLS,
    "cluster.teacher.": {**DISTILLS, "cluster.teacher": {"devices": [4, 5]}},
    "algorithm.teacher.": DISTILLS,
    "cluster.reward.": {"reward_model": JUDGE, "cluster.reward": {"devices": [4, 5]}},
    "algorithm.critic.": {"algorithm.name": "ppo"},
    "algorithm.rejection.": {"algorithm.rejection": {}},
    "algorithm.advantage.": {"algorithm.advantage": {"fn": "./mine.py:advantage"}},
    "algorithm.loss.": {"algorithm.loss": {"fn": "./mine.py:loss"}},
    "algorithm.fixed_length": {"algorithm.aggregation": "fixed_length_mean"},
    "algorithm.gamma": {"algorithm.credit": "return_to_go"},
    "checkpoint.keep_last": {"checkpoint.every": 1},
    "checkpoint.keep_every": {"checkpoint.every": 1, "checkpoint.keep_last": 1},
    "checkpoint.keep_best": {"checkpoint.every": 1, "checkpoint.keep_last": 1},
    "checkpoint.keep_best.metric": {"checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_best": BEST | {"count": 2}},
    "checkpoint.keep_best.count": {
        "checkpoint.every": 1,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": BEST | {"mode": "min", "count": 2},
    },
    "checkpoint.keep_best.mode": {"checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_best": BEST | {"count": 1}},
    "training.max_nonfinite_updates": {"algorithm.loss": {"fn": "./mine.py:not_finite"}},
    "optimizer.total_updates": {"schedule": "linear"},
    "optimizer.min_ratio": {"schedule": "linear"},
}
"""Beginning or end of a path -> what is set, in both runs; keys beside an optimizer's field are its siblings."""

BY_RUNNING = (
    "checkpoint.",
    "cluster.canary",
    "cluster.offload_to_cpu",
    "observe.",
    "run.name",
    "run.folder",
    "training.eval_every",
    "training.compare",
    "training.max_nonfinite_updates",
)
"""Fields whose effect only a run shows."""
BY_PROGRAM = ("training.remat", "training.head_chunk")
"""Fields whose effect is another compiled program."""


# ---------------------------------------------------------------------------------------------------------- finding and changing


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option of a model by path; `0` stands for a list's first item. Sections that are always there are no options themselves."""
    for name, info in model.model_fields.items():
        path, inner = prefix + name, list(sections(info.annotation))
        if len(inner) > 1:  # the algorithms, which are walked one by one
            continue
        optional, many = type(None) in get_args(info.annotation), get_origin(info.annotation) is tuple
        if not inner or optional or many:
            yield path, info
        for section in inner:
            yield from fields(section, f"{path}.0." if many else f"{path}.")


def others(path: str, info: FieldInfo, now: Any) -> list[Any]:
    """Values that might be valid, of which the first valid one is taken; of a closed set all of them."""
    key = next((key for key in OTHER if key == path), None)
    if key is not None:
        return OTHER[key]
    found: list[Any] = []
    for kind in _kinds(info.annotation):
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif kind is bool:
            found += [True, False]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append({} if now is None else None)
    if found:
        return [value for value in found if value != now]
    for kind in _kinds(info.annotation):
        if kind is int:
            found += [2] if now is None else [now + 1, now - 1, now * 2]
        elif kind is float:
            found += [0.5, 1.5, 4.0] if now is None else [now / 2, now * 2, now + 0.25, now + 1]
        elif kind is str:
            found += ["other"]
    return [next((value for value in found if value != now and _valid(path, value)), None)]


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _kinds(argument)
    elif annotation is not type(None):
        yield annotation


VALID: dict[str, Any] = {}
"""The options that `_valid` tries values in."""


def _valid(path: str, value: Any) -> bool:
    try:
        Config.model_validate(changed(VALID, {path: value}))
    except ValidationError:
        return False
    return True


def changed(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The options with values set at dotted paths."""
    options = copy.deepcopy(options)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = options
        for part in parents:
            if isinstance(place, list):
                place = place[int(part)]
            else:
                place[part] = place[part] if place.get(part) is not None else {}
                place = place[part]
        place[last] = value
    return options


def conditions(path: str, algorithm: str) -> dict[str, Any]:
    """What is set in both runs for a field to matter."""
    if path == "algorithm.gamma" and algorithm in ("ppo", "reinforce_pp", "on_policy_distillation"):  # these discount by the token
        return {}
    found: dict[str, Any] = {}
    for key, changes in WHERE.items():
        if path == key or (key.endswith(".") and path.startswith(key)):
            found |= changes
        elif path.endswith(key):
            found |= {f"{path.rpartition('.')[0]}.{name}": value for name, value in changes.items()}
    return found


def at(options: Any, path: str) -> Any:
    value = Config.model_validate(options).model_dump()
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, tuple | list) else value[part]
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("task")


@pytest.fixture(scope="module")
def task(folder: Path) -> dict[str, Any]:
    options = write_task(folder)
    for key in ("model.path", "model.lora.path", "reward_model.path", "algorithm.critic.path", "algorithm.teacher.path"):
        OTHER[key] = [str(folder / Path(value).name) for value in OTHER[key]]
    for section in (OTHER["reward_model"][0], WHERE["reward_model."]["reward_model"], DISTILLS["algorithm.teacher"]):
        section["path"] = str(folder / Path(section["path"]).name)
    VALID.clear()
    VALID.update(options)
    return options


def without_effect(task: dict[str, Any], path: str, info: FieldInfo, see: Any, look_closer: Any = None) -> list[str]:
    """The other values of a field that change nothing. look_closer: asked where `see` finds no difference."""
    before = changed(task, conditions(path, task["algorithm"]["name"]))
    now, seen = at(before, path), see(before)
    assert "error" not in seen, (path, seen)
    VALID.clear()
    VALID.update(before)
    values = [value for value in others(path, info, now) if value not in SAME.get(path, [])]
    assert values, f"{path}: no other value is known: give one in OTHER"
    same = [value for value in values if see(changed(before, {path: value})) == seen]
    if look_closer is not None:
        same = [value for value in same if look_closer(changed(before, {path: value})) == look_closer(before)]
    return [f"{path} = {value!r}" for value in same]


# ------------------------------------------------------------------------------------------------------------------------- tests

ALL = dict(fields(Config))
CRITIC = {f"algorithm.critic.{path}": info for path, info in fields(next(iter(sections(ALGORITHMS[-1].model_fields["critic"].annotation))))}
TEACHER = {f"algorithm.teacher.{path}": info for path, info in fields(TeacherConfig)}
BUILT = {
    path: info
    for path, info in (ALL | CRITIC | TEACHER).items()
    if path not in ALLOWED and not path.startswith((*BY_RUNNING, *BY_PROGRAM, BY_JOINING, BY_RAY))
}


def test_the_allow_list_is_short_and_names_fields():
    assert len(ALLOWED) <= 5 and ALLOWED.keys() <= ALL.keys()
    assert {"training.optimizer.b2", "rewards.0.weight", "model.lora.rank", "rollout.sampling.top_k"} <= BUILT.keys() and len(BUILT) > 70


def test_an_observation_repeats(task: dict[str, Any], folder: Path):
    """Otherwise every field would seem to have an effect."""
    for options in (task, changed(task, {"algorithm.name": "ppo", "model.lora": {"rank": 2}, "reward_model": OTHER["reward_model"][0]})):
        assert "error" not in observe(options, folder)
        assert observe(options, folder) == observe(copy.deepcopy(options), folder)


@pytest.fixture(scope="module")
def built(folder: Path) -> Callable[[Any], dict[str, Any]]:
    """`observe`, each configuration once."""
    return functools.cache(lambda text: observe(json.loads(text), folder))


@pytest.mark.parametrize("path", BUILT)
def test_b127_a_field_changes_what_is_built(task: dict[str, Any], built: Any, path: str):
    assert without_effect(task, path, BUILT[path], lambda options: built(json.dumps(options))) == []


def test_a_field_that_nothing_reads_would_be_found(task: dict[str, Any], built: Any):
    """So that the test above can fail: lion has no eps, and without a schedule there is no last rate."""
    lion = changed(task, {"training.optimizer.name": "lion"})
    for options, path, value in ((lion, "training.optimizer.eps", 5e-09), (task, "training.optimizer.min_ratio", 0.25)):
        assert built(json.dumps(changed(options, {path: value}))) == built(json.dumps(options))


TAUGHT = ("ppo", "on_policy_distillation")
"""Algorithms that take no advantage of one's own."""


def ways_to_see(folder: Path) -> list[Callable[[Any], Any]]:
    return [lambda o, ask=ask: ask(Config.model_validate(o).algorithm, folder) for ask in (observe_algorithm, slope)]


@pytest.mark.parametrize("model", ALGORITHMS, ids=lambda model: model.model_fields["name"].default)
def test_b127_a_field_of_an_algorithm_changes_what_it_does(task: dict[str, Any], folder: Path, model: Any):
    name = model.model_fields["name"].default
    options = changed(task, {"algorithm": {"name": name, "beta": 0.1}})
    walked = {path: info for path, info in fields(model, "algorithm.") if path not in {*CRITIC, *TEACHER, "algorithm.name"}}
    if name in TAUGHT:
        walked = {path: info for path, info in walked.items() if not path.startswith("algorithm.advantage.")}
    silent = [fault for path, info in walked.items() for fault in without_effect(options, path, info, *ways_to_see(folder))]
    assert silent == [] and len(walked) > 20


@pytest.mark.parametrize("own", ["loss", "advantage"])
@pytest.mark.parametrize("model", ALGORITHMS, ids=lambda model: model.model_fields["name"].default)
def test_b127_beside_a_function_of_ones_own_no_option_is_silent(task: dict[str, Any], folder: Path, model: Any, own: str):
    name = model.model_fields["name"].default
    if name in TAUGHT and own == "advantage":
        pytest.skip("a function of one's own is refused there: it gives the critic no returns, or no teacher a say")
    mine = {own: {"fn": f"./mine.py:{own}"}}
    options = changed(task, {"algorithm": {"name": name, "beta": 0.1, "importance": None, **mine}})
    walked = [(path, info) for path, info in fields(model, "algorithm.") if path.count(".") == 1 and path not in {*CRITIC, *TEACHER}]
    silent = [
        fault
        for path, info in walked
        if path not in ("algorithm.name", f"algorithm.{own}")
        for fault in without_effect(options, path, info, *ways_to_see(folder))
    ]
    assert silent == []


def test_no_two_algorithms_do_the_same(task: dict[str, Any], folder: Path):
    seen = [observe_algorithm(model(), folder) for model in ALGORITHMS]
    twins = [(i, j) for i in range(len(seen)) for j in range(i) if seen[i] == seen[j]]
    assert twins == []


@pytest.mark.parametrize("path", BY_PROGRAM)
def test_b127_a_field_changes_the_program(task: dict[str, Any], folder: Path, path: str):
    assert without_effect(task, path, ALL[path], lambda options: {"program": program(options, folder)}) == []


@pytest.mark.parametrize("path", [path for path in ALL if path.startswith(BY_JOINING)])
def test_b127_a_field_changes_how_processes_are_joined(task: dict[str, Any], path: str):
    def asked(options: Any) -> Any:
        config = Config.model_validate(options).cluster.distributed
        return {} if config is None else arguments(config)

    assert without_effect(task, path, ALL[path], asked) == []


@pytest.mark.parametrize("path", [path for path in ALL if path.startswith(BY_RAY)])
def test_b127_a_field_changes_what_ray_is_asked_for(task: dict[str, Any], path: str):
    def asked(options: Any) -> Any:
        config = Config.model_validate(options).environment.ray
        return {} if config is None else ray_arguments(config)

    assert without_effect(task, path, ALL[path], asked) == []


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], dict[str, Any]]:
    """What `burnish train` leaves behind, each configuration once."""

    @functools.cache
    def run(text: str) -> dict[str, Any]:
        root, said = tmp_path_factory.mktemp("work"), io.StringIO()
        (folder / "run.json").write_text(text)
        with contextlib.chdir(root), contextlib.redirect_stdout(said):
            exit_code = main(["train", str(folder / "run.json")])
        return left_behind(root, exit_code=exit_code, said=said.getvalue())

    return run


@pytest.mark.timeout(400)
def test_b127_a_field_changes_what_a_run_does(task: dict[str, Any], finished: Any):
    short = changed(task, {"training.max_steps": 2, "training.batch_size": 2})
    assert finished(json.dumps(short)) == finished(json.dumps(short) + "\n"), "a run that is made again leaves the same"
    paths = [path for path in ALL if path.startswith(BY_RUNNING) and path not in ALLOWED]
    assert len(paths) > 6
    assert [fault for path in paths for fault in without_effect(short, path, ALL[path], lambda o: finished(json.dumps(o)))] == []
