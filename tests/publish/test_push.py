"""`rpg push` through the real client to a small hub, and back from there through from_pretrained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

import rpg
import tiny
from rpg.models.policy import Policy
from running import ENV

LINES = """
import contextlib, io, json, os, sys, time, urllib.request
from rpg import cli
import torch, rpg.models.loading as loading

class Terminal(io.StringIO):
    def isatty(self):
        return True

said = []
for line, token, typed in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO() if typed is None else Terminal(typed)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if line[0] == "stop":
            code = urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").status
            time.sleep(1)
        elif line[0] == "load":
            model, tokenizer = loading.load(line[1])
            code = sum(p.double().sum().item() for p in model.parameters())
        else:
            code = cli.main(line)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
QUICK = {"rollout.dynamic": False, "log.tensorboard": False, "log.view": "none", "log.report": False}
SMALL = {
    "rollout.prompts": 2,
    "rollout.samples": 2,
    "eval.problems": 4,
    "eval.k": 1,
    "rollout.max_new_tokens": 20,
    **QUICK,
}


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """What each line said, {name: (code, out, err)}; the folder of the hub, and that of the runs."""
    root = tmp_path_factory.mktemp("push")
    runs, repos = root / "runs", root / "hub"
    repos.mkdir()
    rpg.train(output=runs / "one", steps=1, **SMALL)
    tiny.with_bytes(root / "base")
    more = {"model": str(root / "base"), "peft.method": "lora"}
    rpg.train(output=runs / "lora", steps=1, **SMALL, **more)
    (root / "strange").mkdir()
    push = ["push", str(runs / "one"), "you/model"]
    lora = ["push", str(runs / "lora"), "you/lora", "--yes"]
    lines = {
        "no token": (push, None, None),
        "unknown token": (push, "hf_unknown", None),
        "no rights": ([*push, "--yes"], "hf_reader", None),
        "another's": (["push", str(runs / "one"), "others/model", "--yes"], "hf_writer", None),
        "no terminal": (push, "hf_writer", None),
        "asked, no": (push, "hf_writer", "n\n"),
        "asked, yes": (push, "hf_writer", "y\n"),
        "loaded": (["load", "you/model"], "hf_writer", None),
        "there": ([*push, "--yes"], "hf_writer", None),
        "updated": ([*push, "--yes", "--update", "--checkpoint", "last", "--revision", "b"], "hf_writer", None),
        "public": (["push", str(runs / "one"), "you/open", "--public", "--yes"], "hf_writer", None),
        "into a public one": (["push", str(runs / "one"), "you/open", "--update", "--yes"], "hf_writer", None),
        "adapter of a folder": (lora, "hf_writer", None),
        "adapter": ([*lora, "--base", "org/base"], "hf_writer", None),
        "no run": (["push", str(root / "strange"), "you/x"], "hf_writer", None),
        "no such run": (["push", str(root / "nowhere"), "you/x"], "hf_writer", None),
        "no name": (["push", str(runs / "one"), "model"], "hf_writer", None),
        "stop": (["stop"], None, None),
        "no network": (push, "hf_writer", None),
    }
    server = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "hub.py", repos], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        env = {**ENV, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "0"}
        env |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        job = [sys.executable, "-c", LINES, json.dumps(list(lines.values()))]
        done = subprocess.run(job, env=env, capture_output=True, text=True, timeout=300)
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr
    assert "hf_writer" not in done.stdout
    return dict(zip(lines, json.loads(done.stdout), strict=True)), repos, runs


def test_a_run_is_pushed_as_it_is_with_its_card(pushed):
    said, repos, runs = pushed
    code, out, err = said["asked, yes"]
    model = max((runs / "one" / "checkpoints").iterdir()) / "model"
    assert code == 0
    assert out.strip().endswith("/you/model")
    assert "you/model: private, new, as you" in err
    assert "of one, step 1 →" in err
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in (repos / "you" / "model").iterdir()} == names
    for name in names - {"README.md"}:
        assert (repos / "you" / "model" / name).read_bytes() == (model / name).read_bytes(), name
    card, here = ((folder / "README.md").read_text() for folder in (repos / "you" / "model", model))
    assert card == here.replace("path/to/this/folder", "you/model") != here
    total = sum(p.double().sum().item() for p in Policy.load(str(model)).model.parameters())
    assert said["loaded"][0] == pytest.approx(total, rel=1e-12)


def test_a_commit_over_it_and_a_branch(pushed):
    said, repos, _ = pushed
    code, out, err = said["updated"]
    assert (code, out.strip().rpartition("/you/")[2]) == (0, "model/tree/b")
    assert "branch b: private, a commit over what is there" in err
    assert (repos / "you" / "model@b" / "model.safetensors").is_file()
    assert "you/open: PUBLIC, new" in said["public"][2]


def test_an_adapter_names_a_model_that_others_have(pushed):
    said, repos, runs = pushed
    assert said["adapter"][0] == 0
    settings = json.loads((repos / "you" / "lora" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base"
    card = huggingface_hub.ModelCard((repos / "you" / "lora" / "README.md").read_text())
    assert (card.data.base_model, card.data.base_model_relation) == ("org/base", "adapter")
    assert "transformers fetches the model it is for" in card.text
    for path in (repos / "you").rglob("*"):
        if path.is_file():
            assert str(runs.parent).encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no token", "no token: run `hf auth login`, or set HF_TOKEN"),
        ("unknown token", "the hub does not know this token: run `hf auth login`"),
        ("no rights", "guest may not write to you/model: give a name of your own"),
        ("another's", "you may not write to others/model"),
        ("no terminal", "there is no terminal to ask at: give --yes"),
        ("there", "you/model exists already, with "),
        ("into a public one", "you/open exists already and is public: give --public"),
        ("adapter of a folder", "give the model's id on the hub with --base"),
        ("no run", "strange is no run, and no model that rpg wrote"),
        ("no such run", "nowhere does not exist"),
        ("no name", "'model' is no name on the hub: give org/name"),
        ("no network", "the hub does not answer ("),
    ],
)
def test_what_cannot_be_is_one_line(pushed, name, text):
    code, out, err = pushed[0][name]
    last = err.strip().splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("rpg push: ")
    assert text in last
    assert len(err.strip().splitlines()) <= 2  # with what goes where before it


def test_no_is_no(pushed):
    said, _, _ = pushed
    assert said["asked, no"][0] == 1
    assert said["asked, no"][2].endswith("nothing was pushed\n")
