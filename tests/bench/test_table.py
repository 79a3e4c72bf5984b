"""Targets, the table and the page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from rpg.bench.table import BenchReport, BenchRow, Quantity, Section, Target, cells, markdown, number, ratio, show
from rpg.bench.timing import SideFailed, error_line

MACHINE = {"device": "a|b", "cores": 2, "date": "2026", "versions": {"rpg": "1", "trl": None}}
FAST = Target("≥ 20× generate", 23.4, least=20.0)
SLOW = Target("≤ 5× floor", 6.0, most=5.0)
COLUMNS = (Quantity("tokens/s", "how many", ",.0f"), Quantity("ms", "how long", ".2f"), Quantity("never", "unused"))


def report():
    rows = [
        BenchRow("rpg", {"tokens/s": 54321.0, "ms": 1.234}, (FAST, SLOW)),
        BenchRow("a peer", {"tokens/s": 12.0}),
        BenchRow("another", error="RuntimeError: no | kernel"),
    ]
    return BenchReport(MACHINE, {"model": "tiny"}, [Section("rollout", "Rollout", COLUMNS, "About it.", rows, 3.0)])


@pytest.mark.parametrize(
    ("target", "mark"),
    [
        (FAST, "✓"),
        (SLOW, "✗"),
        (Target("x", 20.0, least=20.0), "✓"),
        (Target("x", 5.0, most=5.0), "✓"),
        (Target("x", 19.99, least=20.0), "✗"),
        (Target("x", math.nan, least=20.0), "✗"),
        (Target("x", None, least=20.0), "?"),
    ],
)
def test_marks(target, mark):
    assert target.mark == mark
    assert str(target).startswith(f"{mark} {target.what}: ")


def test_cells_leave_out_what_nobody_measured():
    titles, rows = cells(report().sections[0])
    assert titles == ["", "tokens/s", "ms", "must hold"]
    assert rows == [
        ["rpg", "54,321", "1.23", "✓ ≥ 20× generate: 23.4; ✗ ≤ 5× floor: 6"],
        ["a peer", "12", "", ""],
    ]


def test_the_table_and_the_page_say_the_same(capsys):
    show(report())
    shown = capsys.readouterr().out
    page = markdown(report(), "rpg bench rollout")
    for text in ("54,321", "1.23", "another: RuntimeError: no | kernel", "About it.", "1 of 2 targets met"):
        assert text in shown
        assert text in page
    assert "missed: ≤ 5× floor" in page
    assert max(map(len, shown.splitlines())) <= 100
    assert "| rpg | 54,321 | 1.23 | ✓ ≥ 20× generate: 23.4; ✗ ≤ 5× floor: 6 |" in page
    assert "*tokens/s*: how many\n- *ms*: how long\n" in page
    assert "rpg bench rollout" in page
    assert "trl" not in page


def test_a_bar_in_a_name_does_not_break_the_page():
    section = Section("s", "S", COLUMNS, rows=[BenchRow("a|b", {"ms": 1.0})])
    assert "| a\\|b | 1.00 |" in markdown(BenchReport(MACHINE, {}, [section]), "rpg bench")


def test_a_section_without_rows_says_why():
    section = Section("train", "Training", (), error="ValueError: too large")
    assert "train ended early: ValueError: too large" in markdown(BenchReport(MACHINE, {}, [section]), "rpg bench")


def test_json_has_the_verdicts():
    found = json.loads(json.dumps(asdict(report())))
    (section,) = found["sections"]
    assert [t["met"] for t in section["rows"][0]["targets"]] == [True, False]
    assert section["rows"][2]["error"] == "RuntimeError: no | kernel"


def test_small_parts():
    section = report().sections[0]
    assert section.value("rpg", "ms") == 1.234
    assert section.value("a peer", "ms") is None
    assert section.value("nobody", "ms") is None
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(None, 3.0) is ratio(6.0, None) is None
    assert (number(54321.0, ".3g"), number(0.0123, ".3g"), number(1234.5, ".2f")) == ("54,321", "0.0123", "1234.50")
    assert error_line(ValueError("\n one \ntwo")) == "ValueError: one"
    assert error_line(ValueError()) == "ValueError"
    assert error_line(SideFailed("one")) == "one"
