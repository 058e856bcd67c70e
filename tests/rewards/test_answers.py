"""What counts as the right answer, as tables (B131); one reward for each completion (B003)."""

from __future__ import annotations

import time

import pytest

from burnish.rewards import boxed, exact, numeric
from burnish.rewards.answers import last_boxed, last_number


@pytest.mark.parametrize(
    "text",
    [
        "#### 1234",
        "<answer>1,234</answer>",
        "<answer>1234",
        r"\boxed{1234}",
        "1234.0",
        "1,234.00",
        "+1234",
        "1.234e3",
        "12 + 1222 = 1234.",
        "It is $1,234!",
        "99 or 1234",
    ],
)
def test_b131_right(text: str) -> None:
    assert numeric([text], ["1,234"]) == [1.0]


@pytest.mark.parametrize(
    "text",
    ["12345", "1234 or 99", "", "nan", "inf", "-1234", "1234.5", "1,2345", "12 34", "one", "٣", "1234e9", "#### ", "<answer></answer>"],
)
def test_b131_wrong(text: str) -> None:
    assert numeric([text], ["1,234"]) == [0.0]


def test_b131_gold_zero() -> None:
    assert numeric(["0", "1", "-0", "0.00", "zero"], ["0"] * 5) == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 - 9 = -4", "-4"),
        ("-4", "-4"),
        ("7-3", "3"),
        ("(7)-3", "3"),
        ("x=-3", "-3"),
        ("\u22124", "-4"),
        ("is 4 - 4", "4"),
        ("2.5.", "2.5"),
    ],
)
def test_a_minus_is_a_sign_only_where_it_can_be_no_operator(text: str, number: str) -> None:
    assert str(last_number(text)) == number


@pytest.mark.parametrize("gold", [-4, -4.0, "-4", " -4 ", "\u22124", "5 - 9 makes\n#### -4", ["7", "-4"]])
def test_gold_may_be_a_number_a_text_or_several(gold: object) -> None:
    assert numeric(["-4", "4"], [gold, gold]) == [1.0, 0.0]


@pytest.mark.parametrize("gold", ["nan", "four", "", "3 apples", None, True])
def test_a_gold_answer_that_is_no_number_is_an_error_not_a_wrong_answer(gold: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        numeric(["4"], [gold])


def test_b003_one_reward_for_each_completion_whatever_the_number_of_accepted_answers() -> None:
    completions, answers = ["\\boxed{4}", "\\boxed{5}", "\\boxed{4}"], [["4", "4.0"], ["4"], ["4"]]
    assert boxed(completions, answers) == [1.0, 0.0, 1.0]
    assert numeric(completions, answers) == [1.0, 0.0, 1.0]
    assert exact(["4", "5", "4"], answers) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{ \frac{1} {2} }", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{1,234.0}", "1234", 1.0),
        (r"\boxed{x + 1", "x+1", 1.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{3} no, \boxed{4}", "3", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{nan}", "4", 0.0),
    ],
)
def test_boxed(text: str, gold: str, reward: float) -> None:
    assert boxed([text], [gold]) == [reward]


def test_braces_in_a_box_are_balanced() -> None:
    assert last_boxed(r"\boxed{a{b}{c{d}}} tail }") == "a{b}{c{d}}"
    assert last_boxed("no box") is None


def test_exact_is_the_whole_text_with_blanks_and_on_request_case_aside() -> None:
    assert exact([" a  b\n", "a b c", "A b"], ["a b"] * 3) == [1.0, 0.0, 0.0]
    assert exact(["A b"], ["a B"], ignore_case=True) == [1.0]


@pytest.mark.parametrize("text", ["1," * 200_000, "1" * 200_000, "\\boxed{" * 20_000, "-" * 200_000, "1e" * 100_000])
def test_hostile_completions_are_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    numeric([text], ["5"])
    boxed([text], ["5"])
    assert time.process_time() - start < 2.0


def test_nothing_is_evaluated() -> None:
    """B135, as far as answers go: text is read, never run."""
    assert numeric(["__import__('os').getpid() * 0 + 2 * 2"], ["4"]) == [0.0]
