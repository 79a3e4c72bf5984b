"""``rpg report``: what it writes, what it refuses, what it imports."""

import argparse
import subprocess
import sys

import pytest

from rpg import cli
from rpg.commands import report as command


def rpg_report(*words):
    parser = argparse.ArgumentParser()
    command.add_report(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, words)])
    return args.run(args)


def test_the_command_writes_the_page(tmp_path, one, capsys):
    assert rpg_report(one.folder, "-o", tmp_path / "page.html") == 0
    assert "From" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().err == f"wrote {tmp_path / 'page.html'} (1 run)\n"
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("")
    assert rpg_report(tmp_path / "runs" / "a") == 0
    assert (tmp_path / "runs" / "a" / "report.html").exists()
    assert rpg_report(tmp_path / "runs", tmp_path / "runs" / "a", one.folder, "-o", tmp_path / "all.html") == 0
    assert "(2 runs)" in capsys.readouterr().err, "the same run twice is one"


def test_a_dead_folder_does_not_hold_up_the_others(tmp_path, one, capsys):
    (tmp_path / "dead").mkdir()
    (tmp_path / "page.html").touch()
    (tmp_path / "latest").symlink_to(one.folder)
    words = sorted(path for path in tmp_path.iterdir())
    assert rpg_report(*words, one.folder, tmp_path / "gone\x1b", "-o", tmp_path / "all.html") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines[:-1]] == [
        f"{tmp_path / 'dead'} is not a run, nor a folder of runs: no metrics.jsonl or summary.json in it",
        f"{tmp_path / 'page.html'} is not a folder",
        f"there is no folder {tmp_path / 'gone'}\\x1b",
    ]
    assert lines[-1] == f"wrote {tmp_path / 'all.html'} (1 run)"
    with pytest.raises(cli.Mistake, match=r"dead is not a run, .*; there is no folder .*gone$"):
        rpg_report(tmp_path / "dead", tmp_path / "gone", "-o", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_the_commands_mistakes_are_one_line(tmp_path, one):
    cases = [
        ((tmp_path / "none",), "there is no folder"),
        ((tmp_path,), "is not a run, nor a folder of runs"),
        ((one.folder, one.folder), "name the page with -o FILE"),
        ((one.folder, "-o", tmp_path), "it is a folder"),
        ((one.folder, "-o", tmp_path / "no" / "page.html"), "there is no folder"),
    ]
    for words, message in cases:
        with pytest.raises(cli.Mistake, match=message) as error:
            rpg_report(*words)
        assert "\n" not in str(error.value)


def test_a_report_needs_no_torch(one, tmp_path):
    code = (
        "import sys; import rpg.commands.report; from rpg.report import read_run, write;"
        "write([read_run(sys.argv[1])], sys.argv[2]);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    line = [sys.executable, "-c", code, str(one.folder), str(tmp_path / "page.html")]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "[]\n"
