"""Rows become prompts; what can't is named before anything heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.source import DataError, from_file, from_recipe, from_rows, require_at_least, seed_of


def test_a_string_prompt_is_one_user_message_and_other_columns_are_meta() -> None:
    (prompt,) = from_rows([{"prompt": "1 + 1 =", "answer": "2"}], name="sums").prompts
    assert prompt.id == "sums:0"
    assert prompt.messages == ({"role": "user", "content": "1 + 1 ="},)
    assert prompt.meta == {"answer": "2", "seed": seed_of("sums:0")}


def test_rows_may_be_plain_strings() -> None:
    prompts = list(from_rows(["a", "b"], name="s").prompts)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a", "b"]


def test_messages_are_copied_and_the_system_prompt_goes_first_unless_there_is_one() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    rows = [{"chat": own}, {"chat": own[1:]}]
    with_own, without = from_rows(rows, name="s", prompt_key="chat", system_prompt="house").prompts
    assert [message["content"] for message in with_own.messages] == ["mine", "q"]
    assert [message["content"] for message in without.messages] == ["house", "q"]
    with_own.messages[0]["content"] = "changed"
    assert own[0]["content"] == "mine" and len(own) == 2


def test_seed_is_the_rows_own_or_a_fixed_function_of_its_identity() -> None:
    own, derived = from_rows([{"prompt": "a", "seed": 5}, {"prompt": "b"}], name="s").prompts
    assert own.meta["seed"] == 5
    code = "from burnish.data.source import seed_of; print(seed_of('s:1'))"
    other_hash_seed = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert derived.meta["seed"] == int(other_hash_seed.stdout)
    assert 0 <= derived.meta["seed"] < 2**31


def test_a_missing_prompt_column_names_the_columns_there_are() -> None:
    with pytest.raises(DataError, match=r"row 0 has no column 'prompt'.*'question', 'gold'"):
        from_rows([{"question": "q", "gold": "g"}], name="s")


@pytest.mark.parametrize(
    "row", [7, ["a"], {"prompt": []}, {"prompt": 3}, {"prompt": ["text"]}, {"prompt": [{"role": "user", "content": 3}]}]
)
def test_a_row_that_is_no_prompt_is_named(row: object) -> None:
    with pytest.raises(DataError, match="s: row 0"):
        from_rows([row], name="s")  # type: ignore[list-item]


@pytest.mark.parametrize("rows", ["text", {"prompt": ["a"]}, {"a", "b"}, 7, None])
def test_what_is_no_ordered_collection_of_rows_is_refused(rows: object) -> None:
    with pytest.raises(DataError, match="expected a list or an ordered iterable of rows"):
        from_rows(rows, name="s")  # type: ignore[arg-type]


def test_b113_r36_empty_and_too_small_are_errors_that_name_both_sizes() -> None:
    with pytest.raises(DataError, match="sums: the data set is empty"):
        from_rows([], name="sums")
    with pytest.raises(DataError, match="has 3 rows, fewer than one batch of 4"):
        require_at_least(3, 4)
    with pytest.raises(DataError, match="sums is empty"):
        require_at_least(0, 4, name="sums")
    require_at_least(4, 4)
    require_at_least(1, 1)


def test_r36_an_iterator_that_raises_at_row_7_names_the_row() -> None:
    def rows() -> Iterator[str]:
        yield from "abcdefg"
        raise OSError("disk gone")

    with pytest.raises(DataError, match="s: row 7 could not be read: OSError: disk gone"):
        list(from_rows(rows(), name="s").prompts)


def test_r36_an_indexed_source_that_raises_names_the_row() -> None:
    class Rows(list[str]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            if index == 7:
                raise OSError("disk gone")
            return "x"

    source = from_rows(Rows("abcdefghij"), name="s")
    with pytest.raises(DataError, match="s: row 7 could not be read: OSError: disk gone"):
        list(source.prompts)


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "é?", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    for path in (jsonl, parquet):
        source = from_file(path, name="a")
        assert source.num_rows == 2
        assert [(p.id, p.messages[0]["content"], p.meta["answer"]) for p in source.prompts] == [("a:0", "é?", "1"), ("a:1", "b", "2")]


def test_messages_survive_parquet(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": chat}]), tmp_path / "a.parquet")
    (prompt,) = from_file(tmp_path / "a.parquet").prompts
    assert prompt.messages == tuple(chat)


def test_bad_files_are_plain_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        from_file(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"read from \.jsonl and \.parquet files, got '\.csv'"):
        from_file(tmp_path / "a.csv")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        from_file(tmp_path / "bad.jsonl")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        from_file(tmp_path / "bad.parquet")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="the data set is empty"):
        from_file(tmp_path / "empty.jsonl")


def test_a_recipes_options_are_part_of_its_rows_identity() -> None:
    def create_dataset(size: int, split: str = "train") -> list[dict[str, str]]:
        return [{"prompt": f"{split} {i}"} for i in range(size)]

    train = from_recipe(create_dataset, {"size": 2}, name="r.py")
    held_out = from_recipe(create_dataset, {"size": 2, "split": "eval"}, name="r.py")
    ids = [prompt.id for source in (train, held_out) for prompt in source.prompts]
    assert ids == ["r.py[size=2]:0", "r.py[size=2]:1", "r.py[size=2,split=eval]:0", "r.py[size=2,split=eval]:1"]
    seeds = {prompt.meta["seed"] for source in (train, held_out) for prompt in source.prompts}
    assert len(seeds) == 4
