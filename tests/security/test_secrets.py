"""A token given as a flag is used, and found in no file that is written, in no message, and in no recipe."""

import json
import sys
from pathlib import Path

import pytest
import yaml

import rpg
from rpg import cli, secrets
from rpg.api import configure
from rpg.models import loading
from rpg.run.config import Config
from rpg.run.settings import flat, to_yaml
from rpg.training.loop import Failed
from running import TINY

SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model_options.token", "abcdef", True),
        ("model_options.use_auth_token", "abcdef", True),
        ("rollout.vllm.hf_token", "x", True),
        ("a.api_key", "x", True),
        ("a.apiKey", "x", True),
        ("a.client_secret", "x", True),
        ("a.password", 123456, True),
        ("model_options.revision", SECRET, True),
        ("a.other", "sk-proj-AbCdEfGhIjKlMnOpQrStUv", True),
        ("task.chat_options.note", f"Bearer {SECRET}", True),
        ("model_options.token", True, False),  # the login of this machine
        ("model_options.token", "", False),
        ("rollout.max_new_tokens", 80, False),
        ("rollout.end_tokens", "</answer>", False),
        ("task.chat_options.eos_token", "</s>", False),
        ("model_options.pad_token_id", 3, False),
        ("loss.tokenwise", "x", False),
        ("model_options.author", "x", False),
        ("loss.key", "x", False),
        ("output", "runs/sk-learn-beside-ours-in-one-figure", False),
        ("task.rewards.my_token:score", 1.0, False),
    ],
)
def test_what_is_a_secret(path, value, expected):
    assert secrets.is_secret(path, value) is expected


def test_settings_are_written_without_and_read_back():
    options = {"token": SECRET, "revision": "main", "inner": {"api_key": "abcdefgh", "x": 1}}
    config = Config(model_options=options)
    assert flat(config)["model_options.inner"] == {"x": 1}
    assert "model_options.token" not in flat(config)
    assert yaml.safe_load(to_yaml(config))["model_options"] == {"revision": "main", "inner": {"x": 1}}
    assert config.model_options == options  # used as it is


def test_a_run_writes_it_nowhere_and_is_resumed_without(tmp_path, monkeypatch, capsys):
    seen, load = [], loading._from_pretrained

    def noted(name, where, dtype, options):
        seen.append(options.get("token"))
        return load(name, where, dtype, options)

    monkeypatch.setattr(loading, "_from_pretrained", noted)
    run = tmp_path / "run"
    line = ["train", "--output", str(run), *TINY, "--log.tensorboard", "true", "--model_options.token", SECRET]
    monkeypatch.setattr(sys, "argv", ["rpg", *line])
    assert cli.main([*line, "--steps", "1"]) == 0
    assert seen == [SECRET]
    assert SECRET not in " ".join(sys.argv)  # which trackers write down
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert "--model_options.token is used and written nowhere" in said.err
    assert "HF_TOKEN" in said.err

    def holding():
        return [str(path) for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]

    assert (run / "report.html").exists()
    assert (run / "checkpoints").exists()
    assert holding() == []
    assert cli.main(["train", "--resume", "--output", str(run), "--steps", "2"]) == 0  # from the environment
    assert cli.main(["train", "--resume", "--output", str(run), "--steps", "3", *line[-2:]]) == 0  # or again
    assert seen == [SECRET, None, SECRET]
    assert rpg.Run(run).summary["step"] == 3
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\n")
    assert cli.main(["export", "trl", str(recipe), "-o", str(tmp_path / "trl"), *line[-2:]]) == 0
    assert holding() == []


def test_no_recipe_holds_one(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_options: {{token: {SECRET}}}\n")
    with pytest.raises(ValueError, match=r"recipe\.yaml: model_options\.token is a secret.*set HF_TOKEN") as error:
        configure(recipe)
    assert SECRET not in str(error.value)
    recipe.write_text("rollout: {vllm: {api_key: abcdefgh}}\n")
    with pytest.raises(ValueError, match=r"give it as a flag, --rollout\.vllm\.api_key"):
        configure(recipe)


def test_messages_are_without(tmp_path, capsys):
    configure(settings={"model_options": {"token": SECRET}})
    assert str(Failed(f"no access with {SECRET}")) == "no access with (secret)"
    assert cli.main(["audit", "grpo", "--html", f"/nowhere/{SECRET}"]) == 2
    assert SECRET not in capsys.readouterr().err
    from rpg.run.logs import encode, write_summary

    write_summary(tmp_path, {"message": f"failed with {SECRET}"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"message": "failed with (secret)"}
    assert SECRET.encode() not in encode({"step": 1, "response": SECRET})


def test_a_number_in_the_metrics_is_no_secret():
    secrets.keep_hidden({"a.password": 12345678})
    assert secrets.hidden('{"tokens": 12345678}') == '{"tokens": 12345678}'


def test_the_line_that_a_page_records_is_without(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "build_parser", lambda: Stub(seen))
    assert cli.main(["audit", "--x.token", SECRET]) == 0
    assert seen == ["rpg audit --x.token (secret)"]


class Stub:
    def __init__(self, seen):
        self.seen = seen

    def parse_args(self, argv):
        import argparse

        def run(args):
            self.seen.append(args.line)
            return 0

        return argparse.Namespace(**{"x.token": argv[-1]}, command="audit", run=run)


def test_the_recipes_hold_none():
    for path in Path(rpg.__file__).parents[2].glob("recipes/**/*.yaml"):
        assert list(secrets.secrets_in(yaml.safe_load(path.read_text()))) == []
