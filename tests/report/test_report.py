"""Runs are read as they stand, and the page's tables and data have the runs' own numbers in them."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from make_runs import HOSTILE, make_run
from rpg import report
from rpg.console import amount, duration, percent
from rpg.report.charts import CHARTS, present
from rpg.report.labels import spread
from rpg.report.metrics import Metrics, finite
from rpg.report.payload import SAMPLES, TEXT, curves, embed, evenly, gather, sampled, stride
from rpg.report.runs import RunData
from rpg.report.scores import Average, averages, differences, group_by_experiment, scores


def run_of(tmp_path, name="r", rows=(), **more):
    return RunData(name=name, folder=tmp_path / name, rows=Metrics(rows), **more)


def evaluated(*values, task="math", k=8, every=10):
    return [{"step": every * i, f"eval/{task}/mean@{k}": v} for i, v in enumerate(values)]


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_whole(one):
    assert (one.name, one.algorithm, one.task, one.status) == ("latest", "rpg-reinforce-urkl", "arithmetic", "finished")
    assert [row["step"] for row in one.rows] == list(range(61))
    assert one.config["optim"]["lr"] == 1e-3
    assert len(one.samples) == 480
    assert one.remarks == ()
    assert one.seconds == pytest.approx(sum(row.get("time/step", 0) for row in one.rows))


def test_a_line_being_written_is_no_fault_and_a_broken_one_is_counted(tmp_path):
    lines = [
        '{"step": 0, "a": 1}',
        '{"step": 1, "a": NaN, "b": Infinity}',
        "{broken",
        "[1]",
        '{"a": 1}',
        '{"step": 2, "a"',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = report.read_run(tmp_path)
    assert [row["step"] for row in run.rows] == [0, 1]
    assert math.isnan(run.rows[1]["a"])
    assert run.remarks == (
        "a row of metrics.jsonl without a step was left out",
        "2 lines of metrics.jsonl could not be read",
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[-1]]))
    assert report.read_run(tmp_path).remarks == ()
    report.page([run])


def test_a_step_written_twice_has_its_later_values(tmp_path):
    rows = [{"step": 2, "a": 1, "b": 1}, {"step": 1, "a": 5}, {"step": 2, "a": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(report.read_run(tmp_path).rows) == [{"step": 1, "a": 5}, {"step": 2, "a": 2, "b": 1}]


def test_metrics_alone_or_a_summary_alone_make_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/rollout": 2, "time/train": 1.5, "tokens_total": 7}\n')
    run = report.read_run(tmp_path)
    assert (run.name, run.algorithm, run.status, run.step) == (tmp_path.name, "unknown algorithm", "unknown", 1)
    assert (run.seconds, run.tokens, run.samples, run.config) == (3.5, 7, [], {})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "summary.json").write_text('{"algorithm": "grpo", "eval": {"math": {"metric": "mean@4", "last": 0.5}}}')
    run = report.read_run(tmp_path)
    assert scores(run)["math"].last == 0.5
    assert "no step has been written yet" in report.page([run]).lower()


def test_rows_that_are_newer_than_the_summary_count(tmp_path):
    rows = [{"step": i, "time/step": 2.0, "tokens_total": 100 * i} for i in (1, 2, 3)]
    run = run_of(tmp_path, rows=rows, summary={"step": 0, "seconds": 1.0, "tokens_total": 0, "status": "running"})
    assert (run.step, run.seconds, run.tokens) == (3, 6.0, 300)


def test_before_training_there_is_one_number(tmp_path):
    text = report.page([run_of(tmp_path, rows=evaluated(0.375))]).replace("\u00a0", " ")
    assert "<title>37.5 % on math before training</title>" in text
    assert "<h3>Best</h3>" not in text
    assert "<h3>Best</h3>" in report.page([run_of(tmp_path, rows=evaluated(0.375, 0.5))])


def test_broken_documents_are_said_not_raised(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text('{"name": ')
    (tmp_path / "config.yaml").write_text("a: [1, {")
    run = report.read_run(tmp_path)
    assert run.remarks == ("summary.json could not be read", "config.yaml could not be read")
    assert "config.yaml could not be read" in report.page([run]).lower()


@pytest.mark.parametrize("find", [report.read_run, report.find_runs])
def test_what_is_no_run_is_one_line(tmp_path, find):
    file = tmp_path / "file"
    file.write_text("")
    for folder, words in (
        (tmp_path, "not a run"),
        (tmp_path / "none", "there is no folder"),
        (file, "is not a folder"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            find(folder)
        assert "\n" not in str(error.value)


def test_a_folder_of_runs_is_its_runs(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    (tmp_path / "notes").mkdir()
    assert report.find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert report.find_runs(tmp_path / "a") == [tmp_path / "a"]


def test_only_finite_numbers_are_numbers():
    assert [finite(x) for x in (1, 2.5, True, "1", None, math.nan, math.inf, 10**400)] == [1, 2.5] + [None] * 6
    rows = [{"step": 1, "time/step": 3.0, "time/train": 2.0}, {"step": 2, "time/rollout": 1.0, "time/train": math.nan}]
    assert Metrics(rows).seconds.tolist() == [3.0, 1.0]


# ---- first, last, best -----------------------------------------------------------------------------------------------


def test_first_last_and_best_are_the_rows_own(tmp_path):
    rows = evaluated(0.25, 0.75, 0.75, 0.5)
    rows[-1] |= {"eval/math/mean@8_low": 0.4, "eval/math/mean@8_high": 0.6, "eval/math/pass@8": 0.99}
    score = scores(run_of(tmp_path, rows=rows))["math"]
    assert (score.metric, score.first, score.last, score.best) == ("mean@8", 0.25, 0.5, 0.75)
    assert (score.first_step, score.last_step, score.best_step) == (0, 30, 10), "the earliest of two equal ones"
    assert (score.low, score.high) == (0.4, 0.6)


def test_scores_of_two_ks_are_not_mixed_and_nan_is_none(tmp_path):
    rows = [
        *evaluated(0.9, 0.9, k=4),
        {"step": 30, "eval/math/mean@8": 0.5},
        {"step": 40, "eval/math/mean@8": math.nan},
    ]
    score = scores(run_of(tmp_path, rows=rows))["math"]
    assert (score.metric, score.first, score.best, score.last_step) == ("mean@8", 0.5, 0.5, 30)


def test_a_task_may_have_slashes_in_its_name(tmp_path):
    assert set(scores(run_of(tmp_path, rows=evaluated(0.5, task="data/hard.jsonl")))) == {"data/hard.jsonl"}


def three(tmp_path):
    """Two seeds of one algorithm, one of another."""
    made = [("grpo", 0, (0.2, 0.6, 0.5)), ("grpo", 1, (0.2, 0.5, 0.7)), ("dapo", 0, (0.2, 0.9, 0.55))]
    return [
        run_of(
            tmp_path,
            f"{a}-{seed}",
            evaluated(*v),
            config={"algorithm": a, "seed": seed},
            summary={"status": "finished"},
        )
        for a, seed, v in made
    ]


def test_last_and_best_are_means_of_each_runs_own(tmp_path):
    grpo, dapo = group_by_experiment(three(tmp_path))
    last, best = averages(grpo, "math")
    assert last == Average(pytest.approx(0.6), pytest.approx(math.sqrt(0.02)), 2)
    assert best == Average(pytest.approx(0.65), pytest.approx(math.sqrt(0.005)), 2)
    assert averages(dapo, "math") == (Average(0.55, None, 1), Average(0.9, None, 1))
    assert averages(dapo, "other") is None


class Reader(HTMLParser):
    """Tags that balance, the rows of each table, and the words that are shown."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.words, self.tags, self.cell = [], {}, [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables.setdefault(dict(attrs)["class"], [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag in ("strong", "u") and "table" in self.open:
            self.rows[-1][-1] += {"strong": "*", "u": "_"}[tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)
            if {"th", "td"} & set(self.open):
                self.rows[-1][-1] += data


def test_the_table_has_last_and_best_with_the_highest_in_bold(tmp_path):
    reader = Reader(report.page(three(tmp_path)))
    assert reader.open == []
    assert reader.tables["results"][2:] == [
        ["grpo", "2", "*60.0 ± 14.1", "65.0 ± 7.1"],
        ["dapo", "1", "55.0", "*90.0"],
    ]
    first = reader.tables["runs"][1]
    cells = [text.replace("\u00a0", " ").strip("\u2060") for text in first]
    assert cells == ["grpo-0", "grpo", "0", "finished", "20", "20.0 %", "50.0 %", "–", "60.0 %", "10", "–", "–"]


def test_of_three_the_second_highest_is_underlined(tmp_path):
    """Last and Best each for itself; equal ones alike, and the next below them is the second."""
    made = {"grpo": (0.5, 0.7, 0.6), "dapo": (0.5, 0.9, 0.8), "gspo": (0.5, 0.6, 0.8), "ppo": (0.5, 0.5, 0.4)}
    runs = [
        run_of(tmp_path, name, evaluated(*values), config={"algorithm": name}, summary={"status": "finished"})
        for name, values in made.items()
    ]
    assert Reader(report.page(runs)).tables["results"][2:] == [
        ["grpo", "1", "_60.0", "70.0"],
        ["dapo", "1", "*80.0", "*90.0"],
        ["gspo", "1", "*80.0", "_80.0"],
        ["ppo", "1", "40.0", "50.0"],
    ]
    equal = [replace(run, rows=Metrics(evaluated(0.1, 0.3 if i % 2 else 0.1 + 0.2))) for i, run in enumerate(runs)]
    assert [row[2:] for row in Reader(report.page(equal)).tables["results"][2:]] == [["*30.0", "*30.0"]] * 4


def test_a_run_that_is_not_finished_is_marked(tmp_path):
    runs = three(tmp_path)
    runs[2] = replace(runs[2], summary={"status": "failed", "message": "out of <memory>"})
    text = report.page(runs)
    assert "dapo †" in text
    assert "dapo-0: failed at step 20: out of &lt;memory&gt;" in text
    assert "†" not in report.page(three(tmp_path))


def test_an_end_that_was_planned_is_no_warning(tmp_path):
    late = {"status": "finished", "message": "ended after step 20: its 3 minutes are over", "stopped_by": "minutes"}
    run = replace(three(tmp_path)[0], summary=late)
    run.config["minutes"] = 3.0
    text = report.page([run])
    assert 'class="notes"' not in text
    assert "ended by its 3 minutes" in text
    starved = {"status": "finished", "message": "no group had a signal"}
    assert 'class="notes"' in report.page([replace(run, summary=starved)])


def test_the_dots_on_a_page_are_those_of_its_curves(tmp_path):
    text = report.page(three(tmp_path))
    data = json.loads(re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', text, re.S)[1])
    shown = re.findall(r'<i class="swatch ([cd\d ]+)">', text)
    assert [group["swatch"] for group in data["groups"]] * 2 == shown
    assert shown[:2] == ["c2 d0", "c4 d0"]  # grpo, dapo


def test_two_tasks_have_two_columns_each(many):
    reader = Reader(report.page(many))
    assert [len(row) for row in reader.tables["results"][2:]] == [6] * 4
    for row, group in zip(reader.tables["results"][2:], group_by_experiment(many), strict=True):
        shown = [cell.lstrip("*_") for cell in row[2:]]
        assert shown == [spread(a) for task in ("arithmetic", "countdown") for a in averages(group, task)]
    assert sum(cell.startswith("*") for row in reader.tables["results"] for cell in row) == 4


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_seeds_are_grouped_and_other_settings_are_not(tmp_path):
    def configured(name, lr, seed, device="cpu"):
        config = {"algorithm": "grpo", "seed": seed, "device": device, "output": name, "optim": {"lr": lr, "warmup": 5}}
        return run_of(tmp_path, name, config=config | {"log": {"view": name}})

    runs = [configured("a", 1e-3, 0), configured("b", 1e-3, 1, "cuda"), configured("c", 3e-3, 0)]
    found = group_by_experiment(runs)
    assert [(g.label, [r.name for r in g.runs]) for g in found] == [
        ("grpo, optim.lr 0.001", ["a", "b"]),
        ("grpo, optim.lr 0.003", ["c"]),
    ]
    assert list(differences(runs)) == ["device", "optim.lr", "log.view"]
    reader = Reader(report.page(runs))
    assert ["optim.lr", "0.001", "0.003"] in reader.tables["differences"]
    assert ["device", "cpu / cuda", "cpu"] in reader.tables["differences"]
    assert "optim.warmup" in reader.words, "among those that all share"


def test_runs_of_one_name_go_by_their_folders(tmp_path):
    runs = [run_of(tmp_path, "x", evaluated(0.5), config={"seed": seed}) for seed in (0, 1)]
    runs[1] = replace(runs[1], folder=tmp_path / "y")
    reader = Reader(report.page(runs))
    assert [row[0] for row in reader.tables["runs"][1:]] == [str(tmp_path / "x"), str(tmp_path / "y")]


def test_the_headline_says_what_happened(tmp_path, one, many):
    def title(runs):
        words = [text.replace("\u00a0", " ") for text in Reader(report.page(runs)).words if text.strip()]
        assert words[0] in words[1:], "the window's title is the page's"
        return words[0]

    s = scores(one)["arithmetic"]
    assert title([one]) == f"From {percent(s.first)} to {percent(s.last)} on arithmetic"
    assert title(many) == "4 algorithms, 12 runs on 2 tasks"
    assert title([run_of(tmp_path, config={"algorithm": "grpo", "task": {"name": "t"}})]) == "grpo on t"


def test_the_reader_is_warned_before_the_numbers(tmp_path):
    rows = [{"step": 1, "skipped": 1}, {"step": 2, "skipped": 2}]
    summary = {"status": "stopped", "reward_failures": {"raised": 3, "timed_out": 0, "not_finite": 1}}
    text = report.page([run_of(tmp_path, rows=rows, summary=summary)]).replace("\u00a0", " ")
    assert "3 optimiser steps skipped: the loss was not finite" in text
    assert "3 raised, 1 not finite" in text


# ---- what the script gets --------------------------------------------------------------------------------------------


def test_curves_are_the_rows_own(one):
    made = curves(one, CHARTS, 1, True)
    rows = one.rows[1:]
    assert made["x"]["step"] == list(range(1, 61))
    assert made["x"]["tokens"] == [row["tokens_total"] for row in rows]
    assert made["x"]["time"][-1] == pytest.approx(sum(row["time/step"] for row in rows))
    assert made["columns"]["entropy"] == pytest.approx([row["entropy"] for row in rows], rel=1e-4)
    held_out = made["evals"]["arithmetic"]
    assert held_out["x"]["step"] == list(range(0, 61, 5))
    expected = [row["eval/arithmetic/mean@8"] for row in one.rows if row["step"] % 5 == 0]
    assert held_out["columns"]["mean@8"] == pytest.approx(expected, abs=1e-4)
    assert set(held_out["columns"]) == {"mean@8", "mean@8_low", "mean@8_high", *(f"pass@{k}" for k in (1, 2, 4, 8))}


def test_tokens_add_up_where_no_total_is_written(tmp_path):
    rows = [{"step": 1, "entropy": 1, "tokens": 5}, {"step": 2, "entropy": 1}, {"step": 3, "entropy": 1, "tokens": 7}]
    assert curves(run_of(tmp_path, rows=rows), CHARTS, 1, True)["x"]["tokens"] == [5, 5, 12]


def test_what_is_not_finite_is_a_gap_and_is_counted(tmp_path):
    rows = [{"step": i, "grad_norm": v} for i, v in enumerate([1.0, math.nan, math.inf, 4.0])]
    made = curves(run_of(tmp_path, rows=rows), CHARTS, 1, True)
    assert made["columns"]["grad_norm"] == [1, None, None, 4]
    assert made["lost"] == {"grad_norm": 2}


def test_long_curves_are_thinned_evaluations_are_not_and_the_page_says_so(tmp_path):
    rows = [{"step": 0, "eval/m/mean@8": 0.1}]
    rows += [{"step": i, "entropy": float(i)} | ({"eval/m/mean@8": i / 2500} if i % 2 else {}) for i in range(1, 2501)]
    run = run_of(tmp_path, rows=rows)
    width = stride([run])
    made = curves(run, CHARTS, width, True)
    assert width == 3
    assert len(made["x"]["step"]) == 834
    assert made["x"]["step"][:2] == [3, 6]
    assert made["columns"]["entropy"][:2] == [2, 5], "means of 1, 2, 3 and of 4, 5, 6"
    assert (made["lowest"]["entropy"][1], made["highest"]["entropy"][1]) == (4, 6)
    assert len(made["evals"]["m"]["x"]["step"]) == 1251
    assert "mean of 3 steps, the band" in report.page([run])
    assert stride([run] * 12) == 8
    assert "mean of 8 steps." in report.page([run] * 12)
    assert "mean of 3 steps" not in report.page([run_of(tmp_path, rows=rows[:900])])


def test_parts_of_the_reward_and_of_a_mixture_have_their_curves(tmp_path):
    names = ("reward/part/correct", "reward/part/my.score", "reward/solved", "reward/solved/gsm8k")
    run = run_of(tmp_path, rows=[{"step": i, **dict.fromkeys(names, 0.5)} for i in (1, 2)])
    drawn = {chart.key: chart.series for chart in present([run])}
    assert drawn["parts"] == {"reward/part/correct": "correct", "reward/part/my.score": "my.score"}
    assert drawn["sources"] == {"reward/solved/gsm8k": "gsm8k"}
    page = report.page([run])
    assert 'id="chart-parts"' in page
    assert "reward/part/my.score" in page


def test_charts_without_a_number_are_left_out(tmp_path):
    run = run_of(tmp_path, rows=[{"step": 1, "kl/old": 0.1, "kl/ref": math.nan}])
    assert [(chart.key, list(chart.series)) for chart in present([run])] == [("kl", ["kl/old"])]
    assert 'id="chart-entropy"' not in report.page([run])


def test_samples_are_whole_groups_even_over_the_steps(tmp_path):
    samples = [
        {"step": step, "split": "train", "group": g, "prompt": f"{step} {g}", "response": "x", "reward": 1.0}
        for step in range(1, 101)
        for g in (0, 1)
        for _ in range(8)
    ]
    run = run_of(tmp_path, samples=samples)
    shown, responses, total = sampled([run])
    assert (responses, total) == (600, 1600)
    assert {len(group["responses"]) for group in shown} == {8}
    steps = [group["step"] for group in shown]
    assert (steps[0], steps[-1]) == (1, 100)
    assert max(b - a for a, b in pairwise(steps)) <= 2
    assert "600 of the 1,600 responses" in report.page([run])
    assert "1,000 are left out" in report.page([run])
    both, responses, _ = sampled([run, run])
    assert responses <= SAMPLES
    assert {group["run"] for group in both} == {0, 1}
    assert evenly(gather(run), 8) == [samples[:8]]


def test_the_middle_of_a_long_response_is_left_out_and_said(tmp_path):
    run = run_of(tmp_path, samples=[{"step": 1, "response": "a" * 9000 + "b", "reward": math.nan, "level": math.nan}])
    (group,), _, _ = sampled([run])
    text = group["responses"][0]["text"]
    assert text.startswith("aaa")
    assert text.endswith("ab")
    assert f"{9001 - TEXT:,} characters left out" in text
    assert (group["responses"][0]["reward"], group["level"]) == (None, None)
    embed(group)


# ---- the page is one safe file ---------------------------------------------------------------------------------------


def hostile_run(tmp_path):
    folder = make_run(tmp_path / "hostile", steps=5)
    for name in ("summary.json", "samples.jsonl"):
        path = folder / name
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        about = ("name", "message", "device", "split", "level", "algorithm", "status", "task")
        texts = (*about, "prompt", "response", "answer")
        made = [{k: HOSTILE if k in texts else v for k, v in line.items()} | {"message": HOSTILE} for line in lines]
        path.write_text("\n".join(map(json.dumps, made)) + "\n")
    (folder / "config.yaml").write_text(json.dumps({"seed": HOSTILE, HOSTILE: HOSTILE}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {f"eval/{HOSTILE}/mean@8": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report.read_run(folder)


def scripts(text):
    return re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)


def test_hostile_text_is_text(tmp_path):
    run = hostile_run(tmp_path)
    for runs in ([run], [run, replace(run, name="other")]):
        text = report.page(runs)
        reader = Reader(text)
        assert reader.open == []
        assert [tag for tag, _ in reader.tags].count("script") == 2
        assert not {"img", "iframe", "object"} & {tag for tag, _ in reader.tags}
        assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
        data = json.loads(scripts(text)[0])
        assert data["samples"][0]["responses"][0]["text"] == HOSTILE
        assert not re.search("[<>&]", scripts(text)[0])


def test_the_page_may_run_its_own_script_and_load_nothing(one):
    text = report.page([one])
    digest = base64.b64encode(hashlib.sha256(scripts(text)[1].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert not re.search(r"@import|url\(|<img|<iframe", text)
    assert [attrs["href"] for tag, attrs in Reader(text).tags if "href" in attrs] == ["data:,"]
    assert not [attrs for _, attrs in Reader(text).tags if "src" in attrs]


def test_the_page_is_small(one, many):
    assert len(report.page([one]).encode()) < 250_000
    assert len(report.page(many).encode()) < 600_000


def test_half_a_surrogate_pair_can_be_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "response": "\\ud83d", "reward": 0}\n')
    report.write([report.read_run(tmp_path)], tmp_path / "page.html")
    assert '"text":"?"' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        report.page([])


def test_numbers_in_words():
    words = ["–", "4.2 s", "59 s", "1 min 1 s", "1 h 0 min", "2 h 25 min"]
    assert [duration(s) for s in (None, 4.25, 59, 61, 3600, 8700)] == words
    assert [amount(x) for x in (None, 12, 999.7, 1234, 1_048_576)] == ["–", "12", "1 k", "1.23 k", "1.05 M"]
    assert spread(Average(0.9041, 0.0123, 3)) == "90.4 ± 1.2"
