"""Locks: of a row only what the assistant wrote is learned, both halves of a pair after one prompt; a row without that is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.examples import Answer, Example, SupervisedReader, fit, labelled, mismatched, pair, supervised
from burnish.data.source import DataError, RowReader, from_file, from_rows
from burnish.testing.byte_tokenizer import make_byte_tokenizer, make_tiny_tokenizer
from burnish.text.codec import Codec
from burnish.types import Prompt

ASKED, ANSWERED, AGAIN = ({"role": r, "content": c} for r, c in (("user", "2+2"), ("assistant", "4"), ("user", "3+3")))
SIX = {"role": "assistant", "content": "6"}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.load(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def row(columns: Any, *, reader: type[RowReader] = SupervisedReader, **options: Any) -> Prompt:
    return next(iter(from_rows([columns], name="rows", reader=reader, **options).prompts))


def parts(answer: Answer, codec: Codec) -> tuple[str, str]:
    """What is shown and what is learned, as text."""
    texts = (answer.ids[~answer.trained], answer.ids[answer.trained])
    shown, learned = (codec.tokenizer.decode(ids, skip_special=False) for ids in texts)
    return shown, learned


def test_a_conversation_teaches_every_turn_of_the_assistant(codec: Codec) -> None:
    (answer,) = supervised(row({"messages": [ASKED, ANSWERED, AGAIN, SIX], "prompt": "2+2"}), codec).answers
    shown = "<|user|>2+2<|im_end|><|assistant|><|user|>3+3<|im_end|><|assistant|>"
    assert parts(answer, codec) == (shown, "4<|im_end|>6<|im_end|>")
    assert answer.shown == 6 and answer.ids.dtype == np.int32


def test_a_prompt_with_a_completion_is_the_same_as_strings_messages_or_a_whole_conversation(codec: Codec) -> None:
    forms = [{"prompt": "2+2", "completion": c} for c in ("4", [ANSWERED], [ASKED, ANSWERED])]
    forms += [{"prompt": [ASKED], "completion": "4"}, {"messages": [ASKED, ANSWERED]}]
    assert {parts(*supervised(row(form), codec).answers, codec) for form in forms} == {
        ("<|user|>2+2<|im_end|><|assistant|>", "4<|im_end|>")
    }


def test_a_system_prompt_of_ours_does_not_hide_a_whole_conversation(codec: Codec) -> None:
    chosen, rejected = [ASKED, ANSWERED], [ASKED, SIX]
    example = pair(row({"prompt": "2+2", "chosen": chosen, "rejected": rejected}, reader=RowReader, system_prompt="add"), codec)
    assert parts(example.answers[0], codec) == ("<|system|>add<|im_end|><|user|>2+2<|im_end|><|assistant|>", "4<|im_end|>")


@pytest.mark.parametrize("form", [{"text": "1+1=2"}, "1+1=2"])
def test_a_text_is_learned_whole_but_its_first_id_and_with_its_end(codec: Codec, form: Any) -> None:
    (answer,) = supervised(row(form), codec).answers
    assert parts(answer, codec) == ("1", "+1=2<|im_end|>")


def test_both_halves_of_a_pair_follow_the_same_prompt_and_teach_their_own_turn_only(codec: Codec) -> None:
    prompt = [ASKED, ANSWERED, AGAIN]
    example = pair(row({"prompt": prompt, "chosen": "6", "rejected": "seven"}, reader=RowReader), codec)
    shown = "<|user|>2+2<|im_end|><|assistant|>4<|im_end|><|user|>3+3<|im_end|><|assistant|>"
    assert [parts(answer, codec) for answer in example.answers] == [(shown, "6<|im_end|>"), (shown, "seven<|im_end|>")]
    assert [answer.wanted for answer in example.answers] == [True, False]
    lengths = [len(answer.ids) for answer in example.answers]
    assert example.answers[0].shown == example.answers[1].shown == lengths[0] - 2 and example.num_tokens == lengths[0] + 6


def test_a_label_says_whether_an_answer_is_wanted(codec: Codec) -> None:
    rows = [row({"prompt": "2+2", "completion": "4", "label": label}, reader=RowReader) for label in (True, False)]
    assert [labelled(r, codec).answers[0].wanted for r in rows] == [True, False]


def test_rows_come_from_jsonl_and_parquet(codec: Codec, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ({"messages": [ASKED, ANSWERED]}, "1+1"))))
    rows = list(from_file(tmp_path / "rows.jsonl", name="f", reader=SupervisedReader).prompts)
    assert [parts(*supervised(r, codec).answers, codec)[1] for r in rows] == ["4<|im_end|>", "+1<|im_end|>"]
    pq.write_table(pa.table({"prompt": ["2+2"], "chosen": ["4"], "rejected": ["5"]}), tmp_path / "pairs.parquet")
    (only,) = from_file(tmp_path / "pairs.parquet").prompts
    assert [parts(answer, codec)[1] for answer in pair(only, codec).answers] == ["4<|im_end|>", "5<|im_end|>"]


@pytest.mark.parametrize(
    ("encode", "columns", "message"),
    [
        (supervised, {"messages": [ASKED]}, r"rows:0: the assistant wrote nothing"),
        (supervised, {"prompt": "2+2"}, r"rows:0: the assistant wrote nothing"),
        (supervised, {"text": ""}, r"rows:0: the text has 1 tokens"),
        (supervised, {"prompt": "2+2", "completion": 4}, r"rows:0, column 'completion': expected a string or a list"),
        (pair, {"prompt": "2+2", "chosen": "4"}, r"rows:0: there is no column 'rejected'; beside the prompt there are: 'chosen', 'seed'"),
        (pair, {"prompt": "2+2", "chosen": "4", "rejected": "4"}, r"rows:0: `chosen` and `rejected` are the same"),
        (pair, {"prompt": "2+2", "chosen": "4", "rejected": [AGAIN]}, r"rows:0: the assistant wrote nothing in this conversation"),
        (pair, {"prompt": [ASKED, ANSWERED, AGAIN], "chosen": "6", "rejected": [ASKED]}, r"rows:0: the assistant wrote nothing after"),
        (pair, {"prompt": "2+2", "chosen": "4", "rejected": [AGAIN, SIX]}, r"rows:0: rendered with `rejected`, the prompt is another"),
        (labelled, {"prompt": "2+2", "completion": "4", "label": "yes"}, r"rows:0: the column `label` must be true or false, got 'yes'"),
    ],
)
def test_a_row_that_teaches_nothing_is_named(codec: Codec, encode: Any, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(row(columns, reader=SupervisedReader if encode is supervised else RowReader), codec)


def test_a_template_that_rewrites_what_went_before_is_refused_with_the_row(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages | length }}" + "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(DataError, match="rows:0: the chat template rewrites earlier turns"):
        supervised(row({"messages": [ASKED, ANSWERED, AGAIN, SIX]}), Codec.load(folder))


def example(num_ids: int, *, shown: int, name: str = "e") -> Example:
    return Example(name, (Answer(np.arange(num_ids, dtype=np.int32), np.arange(num_ids) >= shown, shown),))


def test_what_is_too_long_is_dropped_cut_or_refused() -> None:
    long = example(9, shown=4)
    assert fit(long, max_tokens=9, overlong="error") is long
    assert fit(long, max_tokens=8, overlong="drop") is None
    cut = fit(long, max_tokens=6, overlong="cut")
    assert cut is not None and cut.answers[0].ids.tolist() == [0, 1, 2, 3, 4, 5] and cut.answers[0].trained.sum() == 2
    assert fit(long, max_tokens=4, overlong="cut") is None  # nothing of the answer would be left
    with pytest.raises(DataError, match=r"e: 9 tokens, `training.max_tokens` is 8"):
        fit(long, max_tokens=8, overlong="error")


def test_a_mismatched_answer_is_another_rows_behind_this_rows_prompt() -> None:
    first, second = example(5, shown=2, name="a"), example(9, shown=6, name="b")
    for made, ids, shown in zip(mismatched([first, second]), ([0, 1, 6, 7, 8], [0, 1, 2, 3, 4, 5, 2, 3, 4]), (2, 6), strict=True):
        (answer,) = made.answers
        assert answer.ids.tolist() == ids and answer.shown == shown and answer.trained.tolist() == [i >= shown for i in range(len(ids))]
