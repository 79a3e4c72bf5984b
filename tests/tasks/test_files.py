"""Problems from files, and one line for whatever is wrong with them."""

import json
import random
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpg.tasks.sources.files import Columns, last_box, load_file, problems_of, split
from rpg.tasks.task import Problem
from rpg.tasks.templates import fill


def load(path, **keys):
    problems, lacking = load_file(path, Columns(**keys))
    assert lacking == 0
    return problems


@pytest.fixture
def write(tmp_path):
    def write(text, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "p", "answer": "a"}, "p", "a"),
        ({"question": "p", "answer": "48/2 = 24\n#### 24"}, "p", "24"),
        ({"problem": "p", "solution": "\\boxed{3}"}, "p", "3"),
        ({"problem": "p", "solution": "So \\boxed{1}, no: \\boxed{\\frac{1}{\\}2}}."}, "p", "\\frac{1}{\\}2}"),
        ({"problem": "p", "solution": "is $\\boxed 2$."}, "p", "2"),
        ({"problem": "p", "solution": "open \\boxed{1} then \\boxed{2"}, "p", "1"),
        ({"prompt": "p", "final_answer": ["1", "$2$"], "solution": ["long"]}, "p", "1, $2$"),
        ({"problem": "p", "solution": "long", "answer": "3"}, "p", "3"),
        ({"prompt": "p", "ground_truth": "a"}, "p", "a"),
        ({"prompt": "p", "target": 98}, "p", "98"),
        ({"prompt": "p", "target": 0}, "p", "0"),
        ({"prompt": "p", "answer": None, "target": -1.50}, "p", "-1.5"),
        ({"prompt": "p", "answer": "", "solution": "is \\boxed{3}"}, "p", "3"),
        (
            {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"style": "rule", "ground_truth": "a"}},
            "p",
            "a",
        ),
    ],
)
def test_rows(write, row, prompt, answer):
    expected = [Problem(prompt, answer)]
    assert load(write(json.dumps(row) + "\n")) == expected
    assert load(write(json.dumps([row], indent=2), "data.json")) == expected


@pytest.mark.parametrize("text", ["\\boxed{" * 50_000, "\\boxed{" * 50_000 + "}" * 50_000, "\\boxed " * 50_000])
def test_boxes_in_boxes_take_no_time(text):
    start = time.process_time()
    last_box(text)
    assert time.process_time() - start < 2  # it was minutes when each box was searched to the end


def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "p"}]
    rows = [
        {"prompt": chat, "reward_model": {"ground_truth": "34", "style": "rule"}, "difficulty": 3.5},
        {"prompt": chat[1:], "reward_model": {"ground_truth": "5", "style": "rule"}, "difficulty": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    assert load(tmp_path / "verl.parquet") == [Problem("p", "34", 3, system="be brief"), Problem("p", "5")]
    pq.write_table(
        pa.table({"question": ["p", "q"], "answer": [0, 7], "level": ["Level 5", "?"]}), tmp_path / "n.parquet"
    )
    assert load(tmp_path / "n.parquet") == [Problem("p", "0", 5), Problem("q", "7")]
    for name, written, read in (
        ("decimal", [Decimal("1.50"), Decimal("-2.00")], ["1.50", "-2.00"]),
        ("bytes", ["é".encode(), b"#### 7"], ["é", "7"]),
        ("float", [1e16, -2.5], ["10000000000000000", "-2.5"]),
    ):
        pq.write_table(pa.table({"question": ["p", "q"], "answer": written}), tmp_path / f"{name}.parquet")
        assert [problem.answer for problem in load(tmp_path / f"{name}.parquet")] == read
    pq.write_table(pa.table({"question": ["p"], "answer": [b"\xff"]}), tmp_path / "raw.parquet")
    refuse(tmp_path / "raw.parquet", "raw.parquet: row 1|answer|no UTF-8|text")
    pq.write_table(pa.table({"question": ["p"], "answer": [float("nan")]}), tmp_path / "nan.parquet")
    refuse(tmp_path / "nan.parquet", "nan.parquet: row 1|answer|NaN")
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    refuse(tmp_path / "empty.parquet", "empty.parquet is empty")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is none")
    refuse(tmp_path / "bad.parquet", "cannot read|bad.parquet")


@pytest.mark.parametrize(
    ("written", "level"),
    [
        ("5.0", 5),
        ("3.5", 3),
        ('"Level 4"', 4),
        ('"2"', 2),
        ('"Level ?"', 0),
        ("-1", 0),
        ("null", 0),
        ("true", 0),
        ("1e9", 0),
    ],
)
def test_levels(write, written, level):
    assert load(write(f'{{"prompt": "p", "answer": "a", "difficulty": {written}}}'))[0].level == level


LACKING = (
    *({"answer": None}, {"answer": " "}, {"answer": "", "solution": None}, {"answer": "x ####  "}),
    *({"reward_model": {"ground_truth": None}}, {"reward_model": None}, {"reward_model.ground_truth": ""}),
)


def test_rows_without_an_answer_are_left_out(write):
    for lacks in LACKING:
        rows = [{"prompt": "p"} | lacks, {"prompt": "q", "answer": 0}] * 2
        assert load_file(write("\n".join(map(json.dumps, rows)))) == ([Problem("q", "0")] * 2, 2)
        column = next(iter(lacks))
        refuse(
            write(json.dumps(rows[::2]), "data.json"), f"data.json: row 1|empty, as in all|'{column}|task.answer_key"
        )
    with pytest.raises(ValueError, match=r"2: no answer.*task\.answer_key"):  # the column itself is not there
        problems_of([("1", {"prompt": "p", "answer": None}), ("2", {"prompt": "p"})])


def test_parquet_rows_without_an_answer(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    truths = [{"ground_truth": "1"}, {"ground_truth": None}, None]
    rows = [{"prompt": [{"role": "user", "content": "p"}], "reward_model": truth} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    assert load_file(tmp_path / "verl.parquet") == ([Problem("p", "1")], 2)


def test_keys_that_only_some_files_have(write):
    path = write('{"prompt": "p", "answer": "a"}')
    assert load(path, prompt="text", answer="gold", strict=False) == [Problem("p", "a")]
    both = write('{"prompt": "p", "answer": "a", "gold": "g"}')
    assert load(both, answer="gold", strict=False) == [Problem("p", "g")]


def test_keys_of_your_own(write):
    path = write('{"prompt": "no", "text": "p", "meta": {"gold": 7}, "answer": "no", "a.b": "flat"}')
    assert load(path, prompt="text", answer="meta.gold") == [Problem("p", "7")]
    assert load(path, prompt="text", answer="a.b") == [Problem("p", "flat")]


def test_numbers_keep_their_digits(write):
    long = "9" * 6000
    rows = [Problem("a", "0.10"), Problem("b", long), Problem("c", "1E400", level=3)]
    path = write(
        '{"prompt": "a", "answer": 0.10}\n'
        f'{{"prompt": "b", "answer": {long}}}\n'
        '{"prompt": "c", "answer": 1E400, "level": 3}'
    )
    assert load(path) == rows


def test_lines(write):
    text = '\ufeff\n{"prompt": "a\u2028b", "answer": "é"}\r\n\r\n   \n{"prompt": "b", "answer": "2"}'
    assert load(write(text)) == [Problem("a\u2028b", "é"), Problem("b", "2")]


GOOD = '{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + '{"prompt": ', "data.jsonl:2: malformed JSON|column"),
        (GOOD + "\n{'prompt': 'p'}", "data.jsonl:3: malformed JSON"),
        (GOOD + '["p", "a"]', "data.jsonl:2|object|list"),
        (GOOD + "7", "data.jsonl:2|object|number"),
        (GOOD + "null", "data.jsonl:2|object|null"),
        (GOOD + '{"text": "p", "answer": "a"}', "data.jsonl:2|no prompt|question|'text', 'answer'|task.prompt_key"),
        (GOOD + '{"prompt": "p", "label": "a"}', "data.jsonl:2|no answer|solution|'prompt', 'label'|task.answer_key"),
        (GOOD + "{}", "data.jsonl:2|none"),
        (GOOD + '{"prompt": null, "answer": "a"}', "data.jsonl:2|prompt is empty"),
        (GOOD + '{"prompt": "p", "answer": ["a"]}', "data.jsonl:2|answer|list|task.answer_key"),
        (GOOD + '{"prompt": "p", "answer": true}', "data.jsonl:2|answer|true or false"),
        (GOOD + '{"prompt": "p", "answer": NaN}', "data.jsonl:2|NaN"),
        (GOOD + '{"prompt": " ", "answer": "a"}', "data.jsonl:2|prompt is empty"),
        (GOOD + '{"prompt": [], "answer": "a"}', "data.jsonl:2|prompt|user"),
        (GOOD + '{"prompt": [{"role": "system", "content": "s"}], "answer": "a"}', "data.jsonl:2|prompt|user"),
        (GOOD + '{"prompt": [{"role": "user", "content": ["s"]}], "answer": "a"}', "data.jsonl:2|prompt|list"),
        (GOOD + '{"prompt": "p", "solution": "' + "long " * 50 + '"}', "data.jsonl:2|solution|boxed|task.answer_key"),
        (
            GOOD
            + '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "a"}',
            "data.jsonl:2|one message of the user|got user, assistant",
        ),
        (GOOD + "[" * 100_000, "data.jsonl:2|malformed|nested"),
        (GOOD.encode() + b'{"prompt": "\xff", "answer": "a"}', "data.jsonl:2|UTF-8"),
        ("", "data.jsonl|empty"),
        ("\n \n", "data.jsonl|empty"),
    ],
)
def test_mistakes_in_a_row(write, text, words):
    refuse(write(text), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "data.json|empty"),
        ("[]", "data.json|empty"),
        ('{"data": []}', "data.json|list|object"),
        ('[{"prompt": "p", "answer": "a"},\n{]', "data.json|malformed|line 2"),
        ('[{"prompt": "p", "answer": "a"}, {"answer": "a"}]', "data.json: row 2|no prompt|'answer'"),
    ],
)
def test_mistakes_in_a_list(write, text, words):
    refuse(write(text, "data.json"), words)


def test_mistakes_with_files(write, tmp_path):
    refuse(tmp_path / "nowhere.jsonl", "no such file|nowhere.jsonl")
    refuse(write("a,b", "data.csv"), "data.csv|.jsonl|.json|.parquet")
    (tmp_path / "folder.json").mkdir()
    refuse(tmp_path / "folder.json", "folder.json|directory")
    refuse(write(GOOD), "data.jsonl:1|no 'text'|'prompt', 'answer'", prompt="text")
    refuse(write(GOOD), "data.jsonl:1|no 'meta.gold'", answer="meta.gold")


def refuse(path, words, **keys):
    with pytest.raises(ValueError) as error:
        load_file(path, Columns(**keys))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    for word in words.split("|"):
        assert word in str(error.value)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text(), lambda x: st.dictionaries(st.text(), x)).map(lambda x: json.dumps(x).encode())
)
def test_any_file_loads_or_is_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    message = ""
    try:
        assert load_file(path)[0]
    except ValueError as error:
        message = str(error)
    assert "\n" not in message


# ---- split -----------------------------------------------------------------------------------------------------------


def test_split_is_stable_and_keeps_duplicates_together():
    problems = [Problem(f"What is {i // 3} + 1?", str(i)) for i in range(3000)]
    train, test = split(problems)
    assert sorted(p.answer for p in train + test) == sorted(p.answer for p in problems)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert 0.07 < len(test) / 3000 < 0.13
    assert " ".join(p.answer for p in split(problems[:66])[1]) == "6 7 8"  # on any day
    shuffled = random.Random(0).sample(problems, 3000)
    assert {p.answer for p in split(shuffled)[1]} == {p.answer for p in test}
    assert {p.answer for p in split(problems[:1500])[1]} <= {p.answer for p in test}
    assert {p.answer for p in test} < {p.answer for p in split(problems, 0.3)[1]}


@pytest.mark.parametrize("spelling", ["what is  {} + 1", "What is \\({}+1\\)?", fill("boxed", "WHAT IS ${} + 1$?")])
def test_split_keeps_spellings_of_a_problem_together(spelling):
    for number in range(20):
        texts = (text.replace("{}", str(number), 1) for text in ("What is ${} + 1$?", spelling))
        train, test = split([Problem(text, "x") for text in texts], 0.5)
        assert {len(train), len(test)} == {0, 2}
    assert all(split([Problem(sign, "x") for sign in "!?.,;:"], 0.5))  # no words at all


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("n", [2, 3, 10])
def test_split_leaves_no_side_empty(share, n):
    for offset in range(20):
        train, test = split([Problem(f"{offset} {i}", "x") for i in range(n)], share)
        assert train
        assert test


def test_split_shares():
    problems = [Problem(str(i), "x") for i in range(10)]
    assert split(problems, 0) == (problems, [])
    assert split(problems, 1) == ([], problems)
    assert split([], 0.5) == ([], [])
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="test_share"):
            split(problems, share)
