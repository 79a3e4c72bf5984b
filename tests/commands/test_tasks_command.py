"""``rpg tasks``: the list, one task in full, and one line for a mistake."""

import json
import re

import pytest

from rpg.cli import main
from rpg.commands.tasks import kind_of
from rpg.tasks.sources.builtin import BUILTIN
from rpg.tasks.sources.datasets import DATASETS


@pytest.fixture
def tasks(capsys):
    def run(*arguments):
        code = main(["tasks", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows(path, *problems):
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    return str(path)


def test_the_list(tasks):
    code, out, _ = tasks()
    assert code == 0
    for name in (*DATASETS, *BUILTIN, "openai/gsm8k@main", "RPG_DATA", "gym:GENERATOR", "0.7*gsm8k + 0.3*math"):
        assert name in out


def test_one_of_them(tasks, tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is [b]1[/b] + 1?"}]
    problems = [{"prompt": chat, "answer": "2", "level": 1}] + [
        {"prompt": f"What is {i} over 7?", "answer": answer, "level": 3}
        for i, answer in enumerate(("1/7", "x^2", "0.5"))
    ]
    train = rows(tmp_path / "train.jsonl", *problems, problems[1], {"prompt": "what is 0 over 7", "answer": "0"})
    test = rows(
        tmp_path / "test.jsonl", {"prompt": "WHAT is 2 over 7", "answer": "0.5"}, {"prompt": "Who?", "answer": "I"}
    )
    code, out, _ = tasks(train, "--test", test)
    assert code == 0
    for line in (
        "  train: 5 problems; answers: whole number 40.0%, fraction 20.0%, formula 20.0%, decimal 20.0%; levels 1–3",
        "  test test: 2 problems; answers: decimal 50.0%, text 50.0%",
        "answer 2, template plain",
        "  (system) Be brief.",
        "  What is [b]1[/b] + 1?",
        "train: 6 rows are 5 problems: copies are merged",
        "train: 1 of 5 problems repeat an earlier one, such as 'what is 0 over 7'",
        "train: 1 of them have another answer there, such as 'what is 0 over 7': '1/7' and '0'",
        "test: 1 of 2 problems are in the training set and stay there, such as 'WHAT is 2 over 7'",
    ):
        assert f"{line}\n" in out
    assert out.count("template plain") == 3
    _, out, _ = tasks(train, "--test", rows(tmp_path / "own.jsonl", {"prompt": "Who?", "answer": "I"}))
    assert "own: none of its problems is in the training set\n" in out


def test_escapes_in_the_data_do_not_reach_the_terminal(tasks, tmp_path):
    bad = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u2028\x85\r"
    prompt, fine = f"one{bad}\n\ttwo", {"prompt": "é 🙂 \\frac", "answer": "2"}
    chat = [{"role": "system", "content": f"sys{bad}"}, {"role": "user", "content": prompt}]
    train = rows(tmp_path / "train.jsonl", {"prompt": chat, "answer": f"a{bad}\nb"}, fine)
    test = rows(tmp_path / "test.jsonl", {"prompt": prompt, "answer": "3"})
    code, out, err = tasks(train, "--test", test)
    assert (code, err) == (0, "")
    assert not [c for c in bad if not (c.isascii() and c.isprintable()) and c in out]
    assert "  one\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\u2066" in out
    assert "answer a\\x1b]0;owned" in out
    assert "  é 🙂 \\frac\n" in out
    assert max(map(len, out.split("\n"))) < 200, "the prompt's own lines stay lines"
    assert re.search(r"^ +two$", out, re.MULTILINE)
    code, _, err = tasks("no\x1b[2Jsuch")
    assert (code, err.count("\n"), "\x1b" in err) == (2, 1, False)


def test_columns_of_your_own(tasks, tmp_path):
    path = rows(tmp_path / "own.jsonl", {"text": "p", "gold": 1}, {"text": "q", "gold": 2})
    assert tasks(path, "--prompt-key", "text", "--answer-key", "gold")[0] == 0
    code, _, err = tasks(path)
    assert code == 2
    assert err.startswith(f"rpg tasks: {path}:1: no prompt")
    assert err.count("\n") == 1


def test_endless_ones(tasks):
    code, out, _ = tasks("arithmetic")
    assert code == 0
    assert out.startswith("arithmetic: +, - and * of 3 to 6 whole numbers from 1 to 20, no brackets")
    assert "train: endless" in out
    code, out, _ = tasks("arithmetic + countdown")
    assert "arithmetic+countdown" in out
    assert "test countdown: endless" in out


def test_mistakes(tasks):
    assert tasks("gsm9k")[0] == 2
    assert "Did you mean 'gsm8k'?" in tasks("gsm9k")[2]
    assert "go with a NAME" in tasks("--test", "gsm8k")[2]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        *(("-7", "whole number"), ("1,234", "whole number"), ("$12$", "whole number"), ("0.5", "decimal")),
        *(("3/4", "fraction"), ("-\\frac{3}{4}", "fraction"), ("(1, 2)", "several values"), ("1, 2", "several values")),
        *(("\\frac{\\pi}{2}", "formula"), ("x+1", "formula"), ("Monday", "text"), ("12 apples", "text")),
    ],
)
def test_kinds_of_answers(answer, kind):
    assert kind_of(answer) == kind
