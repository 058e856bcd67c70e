"""Names in a configuration: an attribute of the one module for that kind, `my_pkg.mod:fn`, `./file.py:fn`; anything else is an error."""

import json
import math
from collections import OrderedDict
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.resolve import check_options, resolve


def test_a_bare_name_is_a_public_attribute_of_the_module():
    assert resolve("loads", kind="reward", module=json) is json.loads
    assert resolve("half", kind="reward", module={"half": abs}) is abs
    with pytest.raises(UserError, match=r"there is no reward `laods`; did you mean `loads`\? \(your own: `my_pkg.mod:name`"):
        resolve("laods", kind="reward", module=json)
    with pytest.raises(UserError, match="there is no reward `zzz`; known: a, b "):
        resolve("zzz", kind="reward", module={"b": abs, "a": abs})
    with pytest.raises(UserError, match="there is no reward `detect_encoding`"):  # a name of json, but not in its __all__
        resolve("detect_encoding", kind="reward", module=json)


def test_a_dotted_name_is_imported():
    assert resolve("collections:OrderedDict", kind="environment") is OrderedDict
    with pytest.raises(UserError, match=r"reward `math:sqr`: math has no `sqr`; did you mean `sqrt`\?"):
        resolve("math:sqr", kind="reward")
    with pytest.raises(UserError, match="there is no module no_such_pkg; install it"):
        resolve("no_such_pkg.mod:fn", kind="reward")
    with pytest.raises(UserError, match="there is no module json.nothing"):
        resolve("json.nothing:fn", kind="reward")


def test_a_reward_that_is_no_function_is_an_error():
    with pytest.raises(UserError, match=r"reward `math:pi` is 3.14.* \(float\), expected a function or a class"):
        resolve("math:pi", kind="reward")


def test_a_file_is_looked_for_beside_the_configuration_then_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "rewards.py").write_text("def fn():\n    return 'conf'\n")
    (tmp_path / "rewards.py").write_text("def fn():\n    return 'cwd'\n")
    (tmp_path / "only.py").write_text("def fn():\n    return 'only'\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("./rewards.py:fn", kind="reward", base=tmp_path / "conf")() == "conf"
    assert resolve("rewards.py:fn", kind="reward")() == "cwd"
    assert resolve("./only.py:fn", kind="reward", base=tmp_path / "conf")() == "only"
    with pytest.raises(UserError, match=r"there is no file ./nope.py; looked for .*conf/nope.py and .*nope.py"):
        resolve("./nope.py:fn", kind="reward", base=tmp_path / "conf")


def test_a_file_runs_once_and_its_classes_can_be_pickled(tmp_path: Path):
    import pickle

    text = """
import dataclasses
runs = []
@dataclasses.dataclass
class Env:
    x: int = 3
def count():
    runs.append(1)
    return len(runs)
"""
    (tmp_path / "env.py").write_text(text)
    assert [resolve("./env.py:count", kind="reward", base=tmp_path)() for _ in range(2)] == [1, 2]
    env = resolve("./env.py:Env", kind="environment", base=tmp_path)
    assert pickle.loads(pickle.dumps(env())) == env()


def test_a_file_that_fails_says_how_and_can_be_mended(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"reward `./rewards.py:fn`: running .*rewards.py failed: ZeroDivisionError: division by zero"):
        resolve("./rewards.py:fn", kind="reward", base=tmp_path)
    file.write_text("import no_such_pkg\n")
    with pytest.raises(UserError, match="failed: ModuleNotFoundError: No module named 'no_such_pkg'"):
        resolve("./rewards.py:fn", kind="reward", base=tmp_path)


def test_a_file_named_alone_means_the_expected_attribute(tmp_path: Path):
    (tmp_path / "recipe.py").write_text("def create_dataset(*, size=1):\n    return [size]\n")
    assert resolve("recipe.py", kind="recipe", base=tmp_path, attribute="create_dataset")() == [1]
    with pytest.raises(UserError, match="doesn't say which name of recipe.py; write `recipe.py:name`"):
        resolve("recipe.py", kind="reward", base=tmp_path)
    with pytest.raises(UserError, match="has no `create_datasets`; did you mean `create_dataset`"):
        resolve("recipe.py:create_datasets", kind="recipe", base=tmp_path)


def test_options_are_checked_against_the_signature():
    def fn(prompts, completions, *, tolerance=0.1, strict=False):
        return [tolerance, strict]

    check_options(fn, {"tolerance": 0.2}, what="reward `fn`", reserved=("prompts", "completions"))
    with pytest.raises(UserError, match=r"options of reward `fn`: it takes no `tolerence`; did you mean `tolerance`\?; `prompts` is"):
        check_options(fn, {"tolerence": 1, "prompts": []}, what="reward `fn`", reserved=("completions", "prompts"))


def test_needed_options_are_named_when_the_options_are_all_there_is():
    def create_dataset(name, *, size=3):
        return [name] * size

    check_options(create_dataset, {"name": "x"}, what="recipe", complete=True)
    with pytest.raises(UserError, match="options of recipe: it needs `name`"):
        check_options(create_dataset, {"size": 1}, what="recipe", complete=True)


def test_a_function_that_takes_anything_and_a_class_are_checked_by_their_signatures():
    check_options(lambda prompts, **columns: None, {"whatever": 1}, what="reward")
    with pytest.raises(UserError, match="it takes no `q`; it takes x"):
        check_options(type("Env", (), {"__init__": lambda self, x=1: None}), {"q": 1}, what="environment")
    check_options(math.hypot, {}, what="reward")
