"""Prompt templates: by name, as text, from a file; a mistake is one line."""

import pytest

from rpg.tasks.templates import TEMPLATES, fill


def test_names():
    assert set(TEMPLATES) == {"plain", "boxed", "answer", "think"}
    assert fill("plain", "1+1\n") == "1+1\n"
    assert fill("boxed", "1+1").startswith("1+1\n\n")
    assert fill("boxed", "1+1").endswith("within \\boxed{}.")
    assert "\n\n1+1\n\n" in fill("answer", "1+1")
    assert "Answer: $Answer" in fill("answer", "1+1")
    assert all(word in fill("think", "1+1") for word in ("<think>", "</think>", "\\boxed{}", "1+1"))
    for name in TEMPLATES:
        assert "{prompt}" not in fill(name, "1+1")
        assert TEMPLATES[name].count("{prompt}") == 1


def test_all_other_braces_are_left_alone():
    assert fill("{prompt} \\frac{1}{2} {0} {} {{x}} %s", "\\boxed{7} {prompt}") == (
        "\\boxed{7} {prompt} \\frac{1}{2} {0} {} {{x}} %s"
    )
    assert fill("boxed", "{prompt} {}").startswith("{prompt} {}\n")


def test_a_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Löse: {prompt}\nAntwort in \\boxed{}\n", encoding="utf-8")
    assert fill(f"@{path}", "1+1") == "Löse: 1+1\nAntwort in \\boxed{}"


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "empty.txt").write_text("Solve it.")
    (tmp_path / "latin.txt").write_bytes("Löse {prompt}".encode("latin-1"))
    for template, words in (
        ("boxd", "unknown template 'boxd'. Did you mean 'boxed'?|{prompt}|@file.txt"),
        ("Solve the problem below, step by step.\n" * 5, "unknown template|{prompt}"),
        ("", "unknown template"),
        (f"@{tmp_path}/none.txt", "task.template: cannot read|none.txt|No such file"),
        (f"@{tmp_path}/empty.txt", "task.template|empty.txt must have {prompt} in it"),
        (f"@{tmp_path}/latin.txt", "task.template|latin.txt is not UTF-8 (byte 2)"),
    ):
        with pytest.raises(ValueError) as error:
            fill(template, "1+1")
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300
        for word in words.split("|"):
            assert word in str(error.value)
