"""Graders on a data set's own answers, without a model."""

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.data.source import from_rows
from burnish.rewards import exact, numeric
from burnish.rewards.check import check_graders
from burnish.rewards.manager import RewardSpec

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "half", "answer": "one half"}, {"prompt": "0", "answer": "0"}]


def test_a_grader_is_refused_its_own_answer_or_fooled_by_anothers() -> None:
    prompts = list(from_rows(ROWS, name="s").prompts)
    texts = {prompt.id: str(prompt.meta["answer"]) for prompt in prompts}

    def lenient(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text in ("4", "0")) for text in completions]

    good, kind, broken = check_graders([RewardSpec.of(exact), RewardSpec.of(lenient), RewardSpec.of(numeric)], prompts, texts)
    assert good.good and (good.count, good.tried) == (3, 3)
    assert [name for name, *_ in kind.refused] == ["s:1"] and [name for name, *_ in kind.fooled] == ["s:1", "s:2"]
    assert broken.refused[0][:2] == ("s:1", "one half") and "is not a number" in broken.refused[0][2]


@pytest.mark.parametrize(
    ("reward", "form", "code", "said"),
    [
        ("exact", "{answer}", 0, "exact on rows.jsonl: 2 of 2 own answers earn 1, 0 of 2 others do"),
        ("boxed", "{answer}", 1, "rows.jsonl:0: its own answer '4' gets 0.0"),
        ("boxed", r"So \boxed{{{answer}}}.", 0, "2 of 2 own answers"),
        ("./own.py:always", "{answer}", 1, "rows.jsonl:0: another row's answer '5' gets 1.0"),
        ("exact", "{gold}", 2, "--answer '{gold}' can't be filled in for rows.jsonl:0: 'gold'; its columns are: answer, seed"),
    ],
)
def test_the_command(
    reward: str, form: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": "?", "answer": answer}) + "\n" for answer in "45"))
    Path("own.py").write_text("def always(completions):\n    return [1.0] * len(completions)\n")
    Path("run.yaml").write_text(f"data: {{train: [{{path: rows.jsonl}}]}}\nrewards: [{{fn: {reward}}}]\n")
    assert main(["rewards", "check", "run.yaml", "--answer", form]) == code
    told = capsys.readouterr()
    assert said in told.out + told.err
