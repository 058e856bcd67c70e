"""`burnish play`: a person at a terminal, who sees what the model would see."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.testing.byte_tokenizer import make_byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LAKE = 'environment.options={env_id: FrozenLake-v1, make: {desc: ["SF", "HG"], is_slippery: false}}'


def at_a_terminal(arguments: Sequence[str], replies: Sequence[str], folder: Path) -> tuple[str, int]:
    """What is seen on a pseudo-terminal, where a reply is typed whenever the prompt comes."""
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "burnish", "play", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, cwd=folder, env=environment)
    os.close(other_end)
    seen, left, deadline = "", list(replies), time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if not select.select([main_end], [], [], 0.2)[0]:
                continue
            try:
                chunk = os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            seen += chunk.decode()
            if seen.endswith("> ") and left:
                os.write(main_end, f"{left.pop(0)}\n".encode())
        return seen.replace("\r\n", "\n"), process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(main_end)


@pytest.mark.slow
def test_a_game_from_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    seen, code = at_a_terminal(["GymText", LAKE, "--seed", "3"], ["right", "up and \\", "away: down"], tmp_path)
    assert code == 0
    assert seen == (
        "[user]\n[S]F\nHG\nActions: left, down, right, up.\n[assistant]\n> right\n[user]\n  (Right)\nS[F]\nHG\n[assistant]\n"
        "> up and \\\n> away: down\n  (Down)\nSF\nH[G]\n--- ok after 2 turns\nrewards of the turns: 0, 1\nenvironment: 1\nreward: 1\n"
    )


def play(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, said: str = "") -> str:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main(["play", *arguments]) == 0
    return capsys.readouterr().out


def test_a_configurations_task_is_shown_as_its_template_writes_it_and_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    rows = [{"prompt": "2 + 2", "answer": "4"}, {"prompt": "2 + 3", "answer": "5"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "data: {eval: [{path: rows.jsonl}], system_prompt: Sums.}\nrewards: [{fn: exact}, {fn: numeric, weight: 0.5}]\n"
    )
    arguments = (str(tmp_path / "run.yaml"), "--model", str(tmp_path), "--row", "1")
    out = play(capsys, monkeypatch, *arguments, said="It is 5\n")
    shown = "<|im_start|>system\nSums.<|im_end|>\n<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    assert out == f"{shown}--- ok after 1 turns\nrewards of the turns: none\nexact: 0\nnumeric: 1\nreward: 0.5\n"
    out = play(capsys, monkeypatch, *arguments)
    assert out == f"{shown}\n--- you left before the end: nothing is graded\n"


def test_tools_are_told_in_words_and_called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call>'
    tools = "agent={agent: ToolAgent, options: {tool_map: {calc: Calculator}}}"
    out = play(capsys, monkeypatch, "ToolEnvironment", tools, "--task", '{"prompt": "6 times 7?"}', said=f"{call}\n42\n")
    assert '"name": "calc"' in out and "[tool]\n42\n[assistant]\n" in out and out.count("6 times 7?") == 1 and "--- ok after 2 turns" in out


def test_what_cant_be_played_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["Nowhere"], "there is no environment `Nowhere`"),
        (["TaskEnvironment", "--task", "{"], "--task is no JSON"),
        (["TaskEnvironment", "--task", "[1]"], "--task must be a JSON object"),
    ):
        assert main(["play", *arguments]) == 2 and said in capsys.readouterr().err
