"""The report: one small file that asks for nothing, with the run's own numbers; in a browser quick, without errors, by keyboard."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.errors import MissingFile, UserError
from burnish.observe.report import page
from burnish.observe.report.data import gather
from tests.observe.browser import Browser
from tests.observe.made_runs import write_run


def data_of(html: str) -> list[dict[str, Any]]:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', html)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small", steps=6, episodes=16, tokens=12, turns=2)


def test_the_page_is_one_file_that_asks_the_network_for_nothing(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(small)]) == 0
    html = (small / "report.html").read_text()
    assert capsys.readouterr().out.startswith(f"{small / 'report.html'} (")
    assert re.findall(r"<(?:link|img|script|iframe)[^>]*(?:src|href)=\"(?!data:,)", html) == [] and "@import" not in html
    assert "{{" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL) and html.count("<main") == 1
    assert "Leon Sorokin" in html, "the licence of the charts' library asks for its notice"


def test_the_page_holds_the_runs_numbers(small: Path) -> None:
    (run,) = data_of(page.build([small]))
    rows = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    assert run["metrics"]["step"] == [1, 2, 3, 4, 5, 6]
    assert run["metrics"]["reward/mean"] == pytest.approx([row["reward/mean"] for row in rows], abs=1e-5)
    assert [len([e for e in run["episodes"] if e["step"] == step]) for step in range(1, 7)] == [16] * 6
    line = json.loads((small / "transcripts" / "step_3.jsonl").read_text().splitlines()[5])
    shown = next(e for e in run["episodes"] if (e["step"], e["group"], e["sample"]) == (3, line["group"][1], line["sample"]))
    assert [run["texts"][m[1]] for m in shown["messages"]] == [m["content"] for m in line["messages"]]
    assert [m[0] for m in shown["messages"]] == ["user", "assistant", "tool", "assistant"] and shown["rewards"] == line["rewards"]
    for turn, told in zip(line["tokens"], shown["tokens"], strict=True):
        assert [run["pieces"][i] for i in told["text"]] == turn["text"]
        assert told["logps"] == [round(1000 * x) for x in turn["logps"]] and told["advantages"] == round(1000 * turn["advantages"])
        assert told["apart"] == [round(1000 * (a - b)) for a, b in zip(turn["policy_logps"], turn["logps"], strict=True)]
    assert run["time"]["trainer"]["update"] == pytest.approx(9 / 20, abs=0.01) and run["health"] == []
    assert [0, "model", "", ""] in run["config"] and [2, "rank", "16", "made.yaml"] in run["config"]
    lanes = {run["timeline"]["lanes"][span[0]] for span in run["timeline"]["steps"]["6"]}
    assert {"threads\tMainThread", "devices\tengine", "episodes\tepisode 001"} <= lanes


def test_what_a_run_said_cant_become_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "evil", steps=2, episodes=8, tokens=4)
    path = run / "transcripts" / "step_1.jsonl"
    path.write_text(path.read_text().replace("What is", "</script><script>alert(1)</script>What is"))
    assert "alert(1)" not in page.build([run])


def test_a_run_without_episodes_or_trace_has_a_page_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bare", steps=2, episodes=8, tokens=4)
    for path in [run / "trace.pftrace", run / "config.yaml", run / "eval.json", *(run / "transcripts").iterdir()]:
        path.unlink()
    (found,) = data_of(page.build([run]))
    assert found["episodes"] == [] and found["time"] is None and found["config"] == []
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no step has ended"):
        gather(run)
    with pytest.raises(MissingFile, match="no run's folder"):
        gather(tmp_path)


def test_what_would_be_too_large_is_left_out_pieces_first(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = page.build([small])
    monkeypatch.setattr(page, "MOST_BYTES", len(whole) - 1)
    (run,) = data_of(page.build([small]))
    detailed = {e["step"] for e in run["episodes"] if "tokens" in e}
    assert len(run["episodes"]) == 96 and detailed == {1, 3, 5, 6} and run["token_steps"] == 2
    assert all(isinstance(e["advantage"], float) for e in run["episodes"] if "tokens" not in e)
    assert gather(small, most_episodes=40)["left_out"] == 64


# -------------------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "large", steps=32, episodes=64, tokens=120, turns=1)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.mark.browser
def test_2000_episodes_are_small_quick_and_quiet(large: Path, tmp_path: Path) -> None:
    assert large.stat().st_size < 8e6
    with Browser(tmp_path) as browser:
        browser.open(large)
        paints = dict(browser.value("performance.getEntriesByType('paint').map(e => [e.name, e.startTime])"))
        assert paints["first-contentful-paint"] < 1500, paints
        browser.press("/")
        took = []
        for text in ("policy", "reward>0.5", "step=7 the", "nothing like this"):
            browser.value(f"view.query = ''; $('search').value = {text!r}; $('search').dispatchEvent(new Event('input')); 0")
            took.append(browser.value("app.filterMs"))
        assert max(took) < 100, took
        assert (
            browser.value("view.found.length") == 0
            and browser.value("document.querySelector('.episodes').textContent") == "Nothing matches."
        )
        assert browser.errors == []
        print(f"{large.stat().st_size / 1e6:.2f} MB, first paint {paints['first-contentful-paint']:.0f} ms, filters {took} ms")


@pytest.mark.browser
def test_the_keyboard_is_enough(large: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(large)
        browser.press("/")
        assert browser.value("app.part") == "samples" and browser.value("document.activeElement.id") == "search"
        browser.press(*"reward>0.9")
        found = browser.value("view.found.map(e => e.reward)")
        assert 0 < len(found) < 2048 and min(found) > 0.9
        browser.press("Escape", "j", "j", "k")
        assert browser.value("view.chosen") == 1
        browser.press("m")
        assert browser.value("view.mode") == "surprise" and browser.value("document.querySelectorAll('.token').length") > 20
        browser.press("c")
        steps = browser.value("[...document.querySelectorAll('.episode .meta')].map(p => p.textContent.split(',')[0])")
        assert len(steps) == 2 and steps[0] != steps[1], "the same prompt at another step"
        assert browser.value("new Set([...document.querySelectorAll('.episode h3')].map(h => h.firstChild.textContent)).size") == 1
        for key, part in zip("1345", ("overview", "batches", "timeline", "config"), strict=True):
            browser.press(key)
            assert browser.value("app.part") == part
        browser.press("t")
        assert browser.value("document.documentElement.classList.contains('dark')") and browser.errors == []


@pytest.mark.browser
def test_every_part_fits_wide_and_narrow_light_and_dark_also_of_two_runs(small: Path, large: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.html"
    assert main(["report", str(large.parent), str(small), "--out", str(both)]) == 0
    for file in (large, both):
        for width, dark in ((1360, False), (1360, True), (420, False)):
            with Browser(tmp_path / f"{file.stem}{width}{dark}", width=width, dark=dark) as browser:
                browser.open(file)
                for key in "12345":
                    browser.press(key)
                    assert browser.value("document.documentElement.scrollWidth") <= width, f"{file.name}, part {key}, {width} px"
                    assert browser.value("$('main').textContent.length") > 20
                assert browser.errors == []
    with Browser(tmp_path / "two") as browser:
        browser.open(both)
        assert browser.value("document.querySelectorAll('.chart .legend i').length") >= 8, "each chart names both runs"
