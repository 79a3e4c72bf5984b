"""Training from Python: what a notebook does, and what it is told when it is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape

import pytest
import torch

import rpg
from rpg import api
from rpg.models.policy import Policy
from rpg.run.config import Config
from rpg.training.evaluate import Evaluation

TINY = {
    "rollout": {"prompts": 4, "samples": 4, "max_new_tokens": 24},
    "eval": {"problems": 8, "k": 2},
    "log": {"view": "none", "tensorboard": False},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rpg.train(output=tmp_path_factory.mktemp("api") / "run", steps=2, checkpoint={"every": 1}, **TINY)


# ---- a notebook ------------------------------------------------------------------------------------------------------


def test_a_run_says_what_its_files_say(run):
    assert isinstance(run, rpg.Run)
    folder = run.folder
    assert folder.name == "run"
    assert repr(run) == f"Run({str(folder)!r})"
    assert run.config == rpg.Run(folder).config
    assert (run.config.steps, run.config.rollout.prompts, run.config.eval.k) == (2, 4, 2)
    assert run.config.rollout.temperature == Config().rollout.temperature
    assert run.metrics == [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert "reward/mean" in run.metrics[1]
    assert run.summary == json.loads((folder / "summary.json").read_text())
    assert {row["split"] for row in run.samples} == {"train", "eval"}
    assert len(run.samples) == len((folder / "samples.jsonl").read_text().splitlines())


def test_its_model_is_the_trained_one_and_generates(run):
    assert run.checkpoint("last") == run.folder / "checkpoints" / "step-000002"
    assert run.model is run.model  # loaded once
    ids = run.tokenizer("1+2\n", return_tensors="pt")["input_ids"]
    text = run.tokenizer.decode(run.model.generate(ids, max_new_tokens=8)[0])
    assert text.startswith("1+2")
    start = Policy.load("builtin").model.state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in run.model.state_dict().items())


def test_its_report_is_written_at_the_end_anywhere_and_shown(run, tmp_path):
    assert "<!doctype html>" in (run.folder / "report.html").read_text(encoding="utf-8")
    assert run.report() == run.folder / "report.html"
    page = run.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    shown = run._repr_html_()
    inside = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" style="[^"]*"></iframe>', shown)[1]
    assert "<" not in inside
    assert unescape(inside) == page.read_text(encoding="utf-8")


def test_it_is_evaluated_as_rpg_eval_does(run, command):
    found = run.evaluate(k=2, problems=4)
    (one,) = found
    assert isinstance(one, Evaluation)
    assert (one.task, one.k, one.problems) == ("arithmetic", 2, 4)
    assert one.mean.low <= one.mean.mean <= one.mean.high
    assert list(one.passed) == [1, 2]
    assert re.fullmatch(r"Evaluation\(arithmetic, 4 problems: mean@2 .*% \[.*\], pass@2 .*% \[.*\]\)", repr(one))
    assert rpg.evaluate(run.folder, k=2, problems=4) == rpg.evaluate(str(run.folder), k=2, problems=4) == found
    printed = json.loads(command("eval", run.folder, "--k", "2", "--problems", "4", "--device", "cpu", "--json").out)
    assert printed == one.metrics() | {"model": str(run.checkpoint() / "model")}


def test_what_an_evaluation_is_asked_for(run):
    config = api.evaluation_config(run, "countdown", temperature=0.5, max_new_tokens=9, checkpoint="last", seed=3)
    assert (config.task.name, config.task.test) == ("countdown", "countdown")
    assert (config.eval.temperature, config.rollout.max_new_tokens, config.seed) == (0.5, 9, 3)
    assert (config.eval.k, config.eval.problems) == (32, 256)
    assert config.model == str(run.checkpoint("last") / "model")
    assert api.evaluation_config("builtin").model == "builtin"
    assert api.evaluation_config(run.checkpoint(1)).model == str(run.checkpoint(1) / "model")
    with pytest.raises(ValueError, match="no checkpoint 'first'; it has best, last, 1"):
        run.evaluate(checkpoint="first")


def test_a_run_is_resumed_with_the_settings_it_has(tmp_path):
    straight = rpg.train(output=tmp_path / "straight", steps=2, **TINY)
    short = rpg.train(output=tmp_path / "short", steps=2, **TINY, checkpoint={"every": 1, "keep": 2})
    kept = short.metrics
    for name in ("metrics.jsonl", "samples.jsonl"):  # as if it had been killed after its first step
        path = short.folder / name
        rows = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 2]
        path.write_text("".join(rows))
    last = short.checkpoint("last")
    last.rename(tmp_path / "gone")
    resumed = rpg.train(output=str(short.folder), resume=True)

    def comparable(rows):
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in rows]

    assert comparable(resumed.metrics) == comparable(kept) == comparable(straight.metrics)
    assert resumed.summary["status"] == "finished"


def test_train_is_training_and_the_report_of_the_first_rank(tmp_path, monkeypatch, capsys):
    from rpg.distributed.ranks import ALONE, World
    from rpg.training import loop

    monkeypatch.setattr(loop, "train", lambda config, **how: {"folder": config.output, "stopped_by": None, **how})
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    config = Config(output=str(tmp_path))
    second = World(rank=1, size=2)
    told = api.fit(config, resume=False, world=second)
    assert (told["folder"], told["resume"], told["world"]) == (str(tmp_path), False, second)
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "report.html").mkdir()
    assert api.fit(config, resume=True, world=ALONE)["resume"]  # the run is whole
    assert re.fullmatch(r"warning: no report.html: .*Is a directory.*\n", capsys.readouterr().err)
    (tmp_path / "report.html").rmdir()
    api.fit(config, resume=False, world=ALONE)
    assert (tmp_path / "report.html").is_file()


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_go_before_the_file_and_are_added_to_tables(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("steps: 7\nloss: {beta: 1e-3, high: 0.3}\nrollout: {prompts: 3, samples: 5}\n")
    for given in (str(file), file, api.configure(file)):
        config = api.configure(given, settings={"loss": {"beta": 0.5}, "rollout": {"samples": 2}, "seed": 4})
        assert config.loss == {"beta": 0.5, "high": 0.3}
        assert (config.steps, config.seed, config.rollout.prompts, config.rollout.samples) == (7, 4, 3, 2)
    dotted = {"loss.beta": 2, "rollout.prompts": 9, "model_options.revision": "1", "optim.betas": [0.8, 0.9]}
    config = api.configure(settings=dotted | {"output": tmp_path})
    assert config.loss == {"beta": 2}
    assert config.model_options == {"revision": "1"}  # text stays text
    assert (config.rollout.prompts, config.optim.betas, config.output) == (9, (0.8, 0.9), str(tmp_path))
    assert api.configure(settings={"task": {"rewards": {"my.py:f": 0.5}}}).task.rewards == {"my.py:f": 0.5}
    assert api.configure() == Config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rolout": {"prompts": 4}}, "unknown setting 'rolout'; did you mean 'rollout'?"),
        ({"rollout": {"promts": 4}}, "unknown setting 'rollout.promts'; did you mean 'rollout.prompts'?"),
        ({"temperature": 0.5}, "unknown setting 'temperature'; did you mean 'rollout.temperature'?"),
        ({"rollout.prompts": 0}, "rollout.prompts must be at least 1; got 0"),
        ({"rollout": 4}, "rollout must be a section of settings by name; got 4"),
        ({"loss": 4}, "loss must be settings by name; got 4"),
        ({"steps": "many"}, "steps must be a whole number; got 'many'"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml: no such file"),
        (
            {"algorithm": "rpg-reinforce-urk"},
            "unknown algorithm 'rpg-reinforce-urk'. Did you mean 'rpg-reinforce-urkl'?",
        ),
        ({"output": "nothing", "resume": True}, "nothing to resume in nothing: there is no config.yaml"),
        ({"model": "./nowhere"}, "./nowhere is no model folder"),
    ],
)
def test_mistakes_are_one_line(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        rpg.train(**{"log.view": "none", "device": "cpu"} | settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_not_overwritten(run):
    before = run.metrics
    with pytest.raises(ValueError, match="holds a run already"):
        rpg.train(output=run.folder, **TINY)
    assert run.metrics == before


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        rpg.Run(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a run"):
        rpg.Run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        _ = rpg.Run(tmp_path).checkpoint()


def test_a_mistake_is_told_before_torch_is_imported():
    program = "import rpg, sys\ntry:\n rpg.train(stps=1)\nexcept ValueError as e:\n print(e, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "unknown setting 'stps'; did you mean 'steps'? False\n"
