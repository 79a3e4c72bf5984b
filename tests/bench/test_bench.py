"""The command without a part: the step of the built-in run, both sides for real; and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rpg.bench.step import SideResult, StepTimes, StepWork, compare
from rpg.bench.timing import SideFailed
from rpg.bench.whole import StepReport, headline, quartiles, show
from rpg.cli import Mistake, Parser
from rpg.console import install

SMALL = ["--prompts", "2", "--samples", "2", "--max-new-tokens", "8", "--repeats", "1", "--threads", "1"]


def bench(*arguments):
    """The command; its sides run in processes of their own."""
    from rpg.commands.bench import add_bench

    parser = Parser(prog="rpg")
    add_bench(parser.add_subparsers(dest="command", parser_class=Parser))
    args = parser.parse_args(["bench", *arguments])
    return args.run(args)


def test_both_sides(tmp_path, capsys):
    pytest.importorskip("trl")
    assert bench(*SMALL, "--json", str(tmp_path / "found.json")) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())

    work, sides = StepWork(**found["work"]), found["sides"]
    assert (work.prompts, work.samples, work.max_new_tokens, work.threads) == (2, 2, 8, 1)
    assert set(sides) == {"rpg", "trl"}
    for side in sides.values():
        assert side["optimiser_steps"] == work.minibatches
        (step,) = side["steps"]  # what warmed it up does not count
        assert step["responses"] == 4
        assert 4 <= step["tokens"] <= 4 * 8
        assert min(step["rollout"], step["reward"], step["train"]) > 0
        assert step["rollout"] + step["reward"] + step["train"] == pytest.approx(step["seconds"])
        assert side["peak_memory_gb"] > 0.1
    medians = {name: side["median"]["seconds"] for name, side in sides.items()}
    assert found["speedup"]["seconds"] == pytest.approx(medians["trl"] / medians["rpg"])
    assert found["machine"]["versions"]["trl"] is not None

    lines = out.splitlines()
    assert lines[0].startswith("A step of rpg is ")
    for label, side in (("rpg 0", "rpg"), ("TRL GRPOTrainer", "trl")):
        row = next(line for line in lines if line.strip().startswith(label))
        assert f"{medians[side]:.3f}" in row
    assert f"{work.minibatches} AdamW steps" in " ".join(out.split())


def test_without_trl_it_is_rpg_alone_and_says_how_to_install(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else find(name, *rest))
    steps = {}

    def compare(work, sides, watch):
        steps.update(dict.fromkeys(sides, work.repeats))
        return {side: SideResult([took(1.0)] * work.repeats, 1.0) for side in sides}

    monkeypatch.setattr("rpg.bench.step.compare", compare)  # its processes: test_both_sides
    assert bench(*SMALL, "--repeats", "2", "--json", str(tmp_path / "found.json")) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert steps == {"rpg": 2}
    assert set(found["sides"]) == {"rpg"}
    assert "speedup" not in found
    assert install("rpg-rl[audit]") in " ".join(out.split())
    assert "GRPOTrainer" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts must be at least 1; got 0"),
        (["--samples", "1"], "--samples must be at least 2; got 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1; got 0"),
        (["--repeats", "0"], "--repeats must be at least 1; got 0"),
        (["--threads", "0"], "--threads must be at least 1; got 0"),
        (["--prompts", "3", "--samples", "3"], "--prompts × --samples must be a multiple of"),
        (["--device", "nonsense"], "device 'nonsense' is not to be had"),
        (["--json", "/nowhere/found.json"], "cannot write /nowhere/found.json: no such folder"),
        (["--device", "cpu", "--model", "tiny"], "--model goes with a part: rollout, logp,"),
        (["--device", "cpu", "--quick"], "--quick goes with a part"),
        (["logp", "--device", "cpu", "--alone"], "--alone goes with the built-in step: without a part, with"),
        (["logp", "--device", "cpu", "--vocab", "0"], "--vocab must be at least 1; got 0"),
        (
            ["rollout", "--device", "cpu", "--model", "0.6b"],
            "no model '0.6b': neither a shape (tiny, 17m, 0.5b, 1.5b, 4b)",
        ),
        (["rollout", "--device", "cpu", "--model", "/nowhere/x"], "no model '/nowhere/x'"),
        (["logp", "--markdown", "/nowhere/x.md"], "cannot write /nowhere/x.md: no such folder"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(Mistake) as caught:
        bench(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_side_that_fails_says_why(monkeypatch):
    """Its process, which would hand the line over: test_apart."""

    @contextmanager
    def here(function, *arguments, limit):
        pipe = SimpleNamespace(send=lambda answer: None, recv=lambda: None)
        answers = iter([lambda: None, lambda: function(pipe, *arguments)])
        yield pipe, lambda: next(answers)()

    monkeypatch.setattr("rpg.bench.step.process", here)
    work = replace(StepWork(), max_new_tokens=9999, repeats=1, threads=torch.get_num_threads())
    with pytest.raises(
        SideFailed, match=r"^rpg: a prompt of [^\n]* do not fit into the 256 of the model: give [^\n]*$"
    ):
        compare(work, ("rpg",))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def took(seconds):
    return StepTimes(seconds, seconds / 2, seconds / 4, tokens=100, responses=10, optimiser_steps=4, score=0.5)


def test_speed_is_a_ratio_of_medians_and_its_spread_one_of_pairs(capsys):
    rpg, trl = [1.0, 2.0, 4.0], [3.0, 8.0, 8.0]
    results = {"rpg": SideResult([took(s) for s in rpg], 1.0), "trl": SideResult([took(s) for s in trl], 2.0)}
    report = StepReport(StepWork(repeats=3), results, [])
    found = report.as_dict()
    assert found["speedup"]["seconds"] == 4.0
    assert found["speedup_of_pairs"] == {"quartiles": [2.5, 3.0, 3.5], "all": [3.0, 4.0, 2.0]}
    assert found["sides"]["rpg"]["median"] == {"seconds": 2.0, "rollout": 1.0, "reward": 0.5, "train": 0.5}
    assert found["sides"]["rpg"]["tokens_per_s"] == 50.0
    assert found["sides"]["trl"]["mean_length"] == 10.0
    assert headline(report) == (
        "A step of rpg is 3.00 times faster than TRL's. TRL/rpg: median of 3 pairs 3.00, "
        "middle half 2.50 to 3.50; ratio of medians 4.00."
    )
    show(report)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_slower_step_is_called_slower():
    results = {"rpg": SideResult([took(3.0)], 1.0), "trl": SideResult([took(2.0)], 1.0)}
    assert headline(StepReport(StepWork(repeats=1), results, [])).startswith(
        "A step of rpg is 1.50 times slower than TRL's"
    )


def test_quartiles():
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
