"""No fault without a test that was seen to fail, and docs/survival.md as tests/survival.py writes it."""

from tests import survival


def test_every_row_has_a_test_a_mutant_and_if_starred_a_lane_that_every_change_passes() -> None:
    found = survival.shown()
    assert len(survival.ROWS) == 48
    assert [name for name, one in found.items() if not one.tests] == []
    assert [name for name, one in found.items() if not one.mutants] == []
    starred = [name.rstrip("*") for name in survival.ROWS if name.endswith("*")]
    assert [name for name in starred if not {"check", "test"} & {*found[name].tests.values()}] == []


def test_the_page_is_what_the_tests_say() -> None:
    assert survival.PAGE.read_text(encoding="utf-8") == survival.page(), "run `python tests/survival.py`"
