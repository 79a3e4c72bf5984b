"""Datasets by name, from files and from a hub on this machine; what a name can be; one line for what goes wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpg.tasks import Problem, load_task, load_tests
from rpg.tasks.sources.datasets import DATASETS, dataset_name
from rpg.tasks.sources.hub import HubId

sys.path.insert(0, str(Path(__file__).parent))
from hub import Hub

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def gsm8k(begin, end):
    return lines(
        *({"question": f"How many are {i} and {i}?", "answer": f"two\n#### {2 * i}"} for i in range(begin, end))
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def put(name, data):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)

    put("gsm8k-train.jsonl", gsm8k(0, 20))
    put("gsm8k_test.jsonl", gsm8k(20, 25))
    math = {"problem": "What is $x$?", "answer": "3", "difficulty": 5.0}
    put("math-train.json", json.dumps([math, math | {"answer": None}, math | {"problem": "And $y$?"}]).encode())
    put("math500.jsonl", lines({"problem": "What is $z$?", "solution": "It is \\boxed{9}", "answer": "4", "level": 2}))
    chats = (
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "二是"}],
        [{"role": "user", "content": "two"}],
    )
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "1"}} for chat in (*chats, chats[0])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dapo-math-17k.parquet")
    chat = [{"role": "user", "content": DAPO.format("Find $n$.")}]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "540"}}] * 32
    (tmp_path / "aime24").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "aime24" / "test.parquet")
    monkeypatch.setenv("RPG_DATA", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing here asks the hub
    return tmp_path


def test_train_and_test(folder):
    task = load_task("gsm8k")
    assert (task.name, len(task.train), len(task.test)) == ("gsm8k", 20, 5)
    assert task.train[3] == Problem("How many are 3 and 3?", "6", template="boxed", source="gsm8k")
    assert list(task.tests) == ["gsm8k"]
    assert task.reward("\\boxed{6}", "6", "") == 1


def test_a_test_set_with_a_name_of_its_own(folder):
    task = load_task("math")
    assert [p.prompt for p in task.train] == ["What is $x$?", "And $y$?"]
    assert task.train[0].level == 5
    assert task.tests == {"math-500": [Problem("What is $z$?", "4", 2, "boxed", source="math-500")]}
    assert "math: 1 rows without an answer are left out" in task.notes
    only = load_task("math-500")
    assert not only.train
    assert only.tests == task.tests


def test_copies_are_merged_and_chinese_left_out(folder):
    whole = load_task("dapo-math-17k", test="aime24")
    assert [p.prompt for p in whole.train] == ["one", "二是", "two"]
    assert {p.template for p in whole.train} == {"answer"}
    assert "dapo-math-17k: 4 rows are 3 problems: copies are merged" in whole.notes
    assert [p.prompt for p in load_task("dapo-math-17k-en", test="aime24").train] == ["one", "two"]


def test_prompts_that_say_how_to_answer_are_left_alone(folder):
    task = load_task("aime24")
    assert task.test == [Problem(DAPO.format("Find $n$."), "540", template="wrapped", source="aime24")]
    assert "aime24: 960 rows" not in task.notes
    assert "aime24: 32 rows are 1 problems: copies are merged" in task.notes


def test_a_tenth_is_held_out_unless_there_is_a_test_set(folder):
    (folder / "own.jsonl").write_bytes(gsm8k(0, 200))
    own = str(folder / "own.jsonl")
    alone = load_task(own)
    assert len(alone.train) + len(alone.test) == 200
    assert 5 < len(alone.test) < 40
    assert f"own: {len(alone.test)} problems of 200 are held out" in alone.notes
    assert len(load_task(own, test="math-500").train) == 200
    named = load_task("dapo-math-17k")
    assert (len(named.train), len(named.test)) == (2, 1)


def test_files_leave_rows_without_an_answer_out(folder):
    task = load_task(str(folder / "math-train.json"), test="math-500")
    assert len(task.train) == 2
    assert "math-train: 1 rows without an answer are left out" in task.notes
    (folder / "own.json").write_text('[{"prompt": "p", "answer": null}]')
    refused(str(folder / "own.json"), "own.json: row 1|'answer' is empty, as in all rows|'prompt', 'answer'|answer_key")


def test_no_held_out_problem_is_in_the_training_set_in_another_spelling(folder):
    rows = json.loads(b"[" + gsm8k(0, 100).replace(b"}\n", b"},").rstrip(b",") + b"]")
    others = [row | {"question": row["question"].upper().rstrip("?")} for row in rows]
    (folder / "own.jsonl").write_bytes(lines(*rows, *others))
    task = load_task(str(folder / "own.jsonl"))
    assert len(task.train) + len(task.test) == 200
    assert any("train" in note and "repeat" in note for note in task.notes)
    assert not any("are in the training set" in note for note in task.notes)


def test_a_mixture_of_two_files_of_the_same_name(folder):
    (folder / "a").mkdir()
    (folder / "own.jsonl").write_bytes(gsm8k(0, 50))
    (folder / "a" / "own.jsonl").write_bytes(gsm8k(50, 90))
    paths = [str(folder / "own.jsonl"), str(folder / "a" / "own.jsonl")]
    task = load_task(f"0.5*{paths[0]} + 0.5*{paths[1]}")
    assert {name: len(test) for name, test in task.tests.items()} == {
        "own": len(load_task(paths[0]).test),
        paths[1]: len(load_task(paths[1]).test),
    }


def test_several_test_sets(folder):
    task = load_task("gsm8k", test="math-500, aime24, gsm8k")
    assert {name: len(problems) for name, problems in task.tests.items()} == {"math-500": 1, "aime24": 1, "gsm8k": 5}
    (folder / "a").mkdir()
    for path in (folder / "a" / "own.jsonl", folder / "own.jsonl"):
        path.write_bytes(gsm8k(0, 3))
    twice = load_task("gsm8k", test=f"{folder / 'own.jsonl'},{folder / 'a' / 'own.jsonl'}")
    assert list(twice.tests) == ["own", str(folder / "a" / "own.jsonl")]
    assert "own: 3 of 3 problems are in the training set and stay there, such as 'How many are 0 and 0?'" in twice.notes
    assert list(load_task("gsm8k", test="gsm8k,math-500, gsm8k").tests) == ["gsm8k", "math-500"]
    with pytest.raises(ValueError, match=r"task\.test"):
        load_task("gsm8k", test=" ,")
    for mixture in ("0.5*gsm8k + 0.5*math-500", "gsm8k + math-500", "2*gsm8k"):
        with pytest.raises(ValueError, match=r"task\.test .* not mixed; write a, b"):
            load_tests(mixture)


def test_test_sets_with_rewards_of_their_own(folder):
    task = load_task("gsm8k", test="arithmetic, math-500")
    sums, words = task.tests["arithmetic"][0], task.tests["math-500"][0]
    assert task.reward(f"answer {sums.answer}", sums.answer, sums.prompt) == 1
    assert task.reward(f"#### {sums.answer}", sums.answer, sums.prompt) == 0  # as verify would not have it
    assert task.reward("#### 4", words.answer, words.prompt) == 1
    assert task.reward("#### 6", task.train[3].answer, task.train[3].prompt) == 1
    assert not task.trusted
    plain = load_task("gsm8k", test="math-500")
    assert plain.reward is load_task("gsm8k").reward


def test_keys_are_for_files_alone(folder):
    (folder / "own.jsonl").write_bytes(lines({"text": "p", "gold": "1"}, {"text": "q", "gold": "2"}))
    task = load_task(str(folder / "own.jsonl"), test="math-500", prompt_key="text", answer_key="gold")
    assert [(p.prompt, p.answer) for p in task.train] == [("p", "1"), ("q", "2")]
    with pytest.raises(ValueError, match=r"own\.jsonl:1: no prompt.*'text', 'gold'.*task\.prompt_key"):
        load_task(str(folder / "own.jsonl"), test="math-500")


def test_spellings():
    for given in ("gsm8k", "GSM8K", "gsm-8k", "gsm_8k"):
        assert dataset_name(given) == "gsm8k"
    assert [dataset_name(given) for given in ("MATH-500", "math500", "aime_2024", "AIME25")] == [
        "math-500",
        "math-500",
        "aime24",
        "aime25",
    ]
    assert dataset_name("gsm9k") is None
    for row in DATASETS.values():
        for part in (row.train, row.test):
            assert part is None or HubId.parse(part.hub).split


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gsm9k", "unknown task 'gsm9k'|Did you mean 'gsm8k'?|.parquet|my_task.py:make"),
        ("./here", "cannot read here|.jsonl"),
        ("none.parquet", "no such file: none.parquet"),
        ("gsm8k+math", "unknown task 'gsm8k+math'|0.7*gsm8k + 0.3*math, with spaces around the +"),
        ("aime24 + gsm8k", "aime24 has no problems to train on"),
    ],
)
def test_names_that_are_none(folder, name, words):
    refused(name, words)


def test_folders_that_are_none(folder, monkeypatch):
    (folder / "gsm8k").mkdir()
    (folder / "gsm8k" / "train.jsonl").write_bytes(gsm8k(0, 2))
    refused("gsm8k", "RPG_DATA|gsm8k/train.jsonl and gsm8k-train.jsonl")
    monkeypatch.setenv("RPG_DATA", str(folder / "nowhere"))
    refused("gsm8k", "RPG_DATA|no folder|nowhere")


def refused(name, words, **keys):
    with pytest.raises(ValueError) as error:
        load_task(name, **keys)
    assert "\n" not in str(error.value)
    for word in words.split("|"):
        assert word in str(error.value)


# ---- the hub ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, time
from rpg.tasks import load_task
for line in sys.stdin:
    start = time.time()
    try:
        task = load_task(**json.loads(line))
        found = {"train": [[p.prompt, p.answer, p.template] for p in task.train], "notes": task.notes,
                 "tests": {name: [p.prompt for p in test] for name, test in task.tests.items()}}
    except ValueError as error:
        found = {"error": str(error)}
    print("FOUND " + json.dumps(found | {"seconds": time.time() - start}))
"""

CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: main/train.jsonl}]
---
"""


def ask(url, home, *tasks):
    env = {name: value for name, value in os.environ.items() if name != "RPG_DATA"}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        env.pop(name, None)
    given = "".join(json.dumps(task if isinstance(task, dict) else {"name": task}) + "\n" for task in tasks)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=given, env=env, capture_output=True, text=True, cwd=home
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(tasks)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def answers(home):
    pq.write_table(
        pa.table({"question": ["p", "q", "q"], "answer": [7, 8, 8], "picture": [b"", b"1", b"2"]}),
        home / "file.parquet",
    )
    repos = {
        "openai/gsm8k": {"README.md": CARD, "main/train.jsonl": gsm8k(0, 20), "main/test.jsonl": gsm8k(20, 25)},
        "org/bare": {"data/train.parquet": (home / "file.parquet").read_bytes()},
        "org/lacks": {"train.jsonl": lines({"text": "p", "label": "1"})},
        "math-ai/aime25": {"test.jsonl": lines({"problem": "Find $n$.", "answer": "70", "id": "0"})},
        "org/hidden": {
            "train.jsonl": lines(*({"problem": str(i), "answer": i or None} for i in range(30))),
            "test.jsonl": lines({"problem": "p", "answer": None}),
        },
        "org/gated": (403, "GatedRepo"),
        "org/locked": (401, "GatedRepo"),
        "org/busy": (503, ""),
    }
    names = (
        *("gsm8k", "openai/gsm8k@main", "openai/gsm8k@main#test", "openai/gsm8k", "openai/gsm8k@maim"),
        *(
            "openai/gsm8k@main#tests",
            "org/bare",
            "org/lacks",
            "org/hidden",
            "org/hidden#test",
            "org/gated",
            "org/locked",
            "org/busy",
            "org/none",
        ),
        {"name": "org/lacks", "prompt_key": "text", "answer_key": "label", "test": "aime25"},
    )
    with Hub(repos) as hub:
        found = ask(hub.url, home, *names)
    return {name if isinstance(name, str) else "keys": answer for name, answer in zip(names, found, strict=True)}


def test_from_the_hub(answers):
    named = answers["gsm8k"]
    assert named["train"][3] == ["How many are 3 and 3?", "6", "boxed"]
    assert (len(named["train"]), len(named["tests"]["gsm8k"])) == (20, 5)
    assert answers["openai/gsm8k@main"]["train"] == named["train"]  # the template too: it is in the table
    only = answers["openai/gsm8k@main#test"]
    assert (only["train"], only["tests"]["gsm8k"]) == ([], named["tests"]["gsm8k"])
    assert [answers["org/bare"]["train"], answers["org/bare"]["tests"]] == [[["q", "8", "plain"]], {"bare": ["p"]}]
    assert "bare: 3 rows are 2 problems: copies are merged" in answers["org/bare"]["notes"]
    hidden = answers["org/hidden"]  # a test set whose answers are not published
    assert len(hidden["train"]) + len(hidden["tests"]["hidden"]) == 29
    assert "hidden: 2 rows without an answer are left out" in hidden["notes"]
    assert answers["keys"]["train"] == [["p", "1", "plain"]]
    assert answers["keys"]["tests"] == {"aime25": ["Find $n$."]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openai/gsm8k", "several subsets|openai/gsm8k@main|main, socratic"),
        ("openai/gsm8k@maim", "no subset 'maim'|openai/gsm8k@main|main, socratic"),
        ("openai/gsm8k@main#tests", "no split 'tests'|openai/gsm8k@main#train|train, test"),
        ("org/hidden#test", "org/hidden (test): row 1|'answer' is empty, as in all rows|task.answer_key"),
        ("org/lacks", "no prompt|'text', 'label'|task.prompt_key"),
        ("org/gated", "gated|accept its terms at https://huggingface.co/datasets/org/gated|`hf auth login`"),
        ("org/locked", "gated|https://huggingface.co/datasets/org/locked|`hf auth login`"),
        ("org/busy", "503|org/busy|later"),
        ("org/none", "no such dataset|org/none|`hf auth login`"),
    ],
)
def test_what_the_hub_refuses(answers, name, words):
    found = answers[name]
    assert "\n" not in found["error"]
    for word in words.split("|"):
        assert word in found["error"]
    assert found["seconds"] < 8


def test_without_a_network(answers, home):
    """At once; what was loaded before is in the cache."""
    begin = time.time()
    cached, other = ask("http://127.0.0.1:9", home, "gsm8k", "org/other")
    assert time.time() - begin < 30
    assert cached["train"] == answers["gsm8k"]["train"]
    assert cached["tests"] == answers["gsm8k"]["tests"]
    assert "no network" in other["error"]
    assert "RPG_DATA" in other["error"]
    assert other["seconds"] < 8
