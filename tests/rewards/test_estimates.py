"""Numbers over several samples of each task, worked by hand."""

import numpy as np
import pytest

from burnish.rewards.estimates import answer_key, avg_at_k, maj_at_k, pass_at_k

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], float)


def test_avg_and_pass() -> None:
    assert avg_at_k(REWARDS) == 0.25
    assert pass_at_k(REWARDS, 1) == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert pass_at_k(REWARDS, 2) == pytest.approx((1 - 3 / 6 + 1 - 1 / 6 + 0) / 3)
    assert pass_at_k(REWARDS, 4) == pytest.approx(2 / 3)
    assert pass_at_k(REWARDS * 0.5, 1, solved=0.5) == pass_at_k(REWARDS, 1)
    for k in (0, 5):
        with pytest.raises(ValueError, match="a k from 1 to 4"):
            pass_at_k(REWARDS, k)


def test_the_majority_is_of_answers_not_of_rewards() -> None:
    assert maj_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]), [["4", "5", "6", "7"]]) == 1.0, "a tie goes to the first"
    assert maj_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]), [["4", "5", "5", "7"]]) == 0.0
    assert maj_at_k(np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]), [["5", "4", "4"], ["", "", "4"]]) == 1.0, "no answer is no vote"
    assert maj_at_k(np.array([[0.0, 0.0]]), [["", ""]]) == 0.0


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("so it is 12.", "12", True),
        ("1,234", "1234.0", True),
        (r"\boxed{4}", "the answer: 4", True),
        (r"\boxed{ x + 1 }", r"\boxed{x+1}", True),
        (r"\boxed{x+1}", r"\boxed{y+1}", False),
        ("Yes", " yes ", True),
        ("3 or 4", "3", False),
    ],
)
def test_what_counts_as_the_same_answer(left: str, right: str, same: bool) -> None:
    assert (answer_key(left) == answer_key(right)) is same
