"""Settings from YAML and flags: what is read, what is refused and how, and that nothing is lost on the way back."""

import argparse
import contextlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rpg.cli import Parser
from rpg.run import settings
from rpg.run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig, TaskConfig
from rpg.training.setup import pick_dtype


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    """a rate
    of 50 %"""
    mode: Literal["one", "two"] = "one"
    """which"""


@dataclass(frozen=True)
class Middle:
    inner: Inner = Inner()
    pair: tuple[float, int] = (0.5, 2)
    """two of them"""


@dataclass(frozen=True)
class Outer:
    count: int = 3
    """how many"""
    label: str | None = None
    """a label"""
    switch: bool = True
    free: dict[str, Any] = field(default_factory=dict)
    """whatever"""
    middle: Middle = Middle()


def parse(*args, cls=Config):
    """What a subcommand would see: the settings, through argparse, below another parser."""
    parser = Parser(prog="rpg")
    command = parser.add_subparsers(parser_class=Parser).add_parser("train")
    command.add_argument("--config", type=Path)
    settings.add_flags(command, cls)
    return settings.given(parser.parse_args(["train", *args]), cls)


def built(*args, cls=Config):
    return settings.build(cls, flags=parse(*args, cls=cls))


def from_text(tmp_path, text, cls=Config, **flags):
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    return settings.build(cls, file=file, flags=flags)


def refused(call, *args, **more):
    with pytest.raises(ValueError) as error:
        call(*args, **more)
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- flags


def test_flags_of_every_kind():
    config = built(
        *("--steps", "7", "--rollout.temperature", "0.5", "--optim.betas", "0.8,0.99", "--optim.name", "schedule-free"),
        *("--log.tensorboard", "false", "--rollout.dynamic", "--task.chat", "none", "--log.wandb=project"),
        *("--loss.beta", "1e-3", "--loss.high=0.3", "--loss.level", "token", "--loss.low", "-1", "--optim.lr", "1"),
    )
    assert config == Config(
        steps=7,
        loss={"beta": 1e-3, "high": 0.3, "level": "token", "low": -1},
        rollout=RolloutConfig(temperature=0.5, dynamic=True),
        optim=OptimConfig(name="schedule-free", betas=(0.8, 0.99), lr=1.0),
        log=LogConfig(tensorboard=False, wandb="project"),
    )
    assert isinstance(config.optim.lr, float)


def test_a_flag_that_is_not_given_leaves_no_trace():
    assert parse() == {}
    assert parse("--steps", "60") == {"steps": 60}


def test_quoted_text_stays_text_in_a_dict():
    assert built("--loss.kind", "'1e-3'").loss == {"kind": "1e-3"}
    assert built("--loss.kind", "[1, 2e3]").loss == {"kind": [1, 2000.0]}


def test_nested_sections_and_mixed_tuples():
    made = built("--middle.inner.rate", "2", "--middle.pair", "1e-3,4", "--free.a", "true", "--switch", "no", cls=Outer)
    assert made == Outer(switch=False, free={"a": True}, middle=Middle(Inner(rate=2.0), (1e-3, 4)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rollout.temprature", "1"], "unknown option --rollout.temprature; did you mean --rollout.temperature?"),
        (["--rollout.temprature=1"], "unknown option --rollout.temprature; did you mean --rollout.temperature?"),
        (["--temperature", "1"], "unknown option --temperature; did you mean --rollout.temperature?"),
        (["--confg", "1"], "unknown option --confg; did you mean --config?"),
        (["--rollout.temp", "1"], "unknown option --rollout.temp"),  # no abbreviations
        (["--xyzzy"], "unknown option --xyzzy"),
        (["--optim.learning_rate", "1"], "unknown option --optim.learning_rate; did you mean --optim.lr?"),
        (["--learning-rate=1"], "unknown option --learning-rate; did you mean --optim.lr?"),
        (["--method", "grpo"], "did you mean --algorithm?"),
        (["--batch_size", "8"], "did you mean --rollout.prompts?"),
        (["--num_generations", "8"], "did you mean --rollout.samples?"),
        (["--max_completion_length", "8"], "did you mean --rollout.max_new_tokens?"),
        (["--rollout.max-new-tokens", "8"], "did you mean --rollout.max_new_tokens?"),
        (["--kl_coef", "0"], "did you mean --loss.beta?"),
        (["--staleness", "1"], "did you mean --rollout.ahead?"),
        (["--async"], "did you mean --rollout.ahead?"),
        (["--vllm_importance_sampling_correction", "true"], "did you mean --loss.mismatch?"),
        (["--temprature", "1"], "did you mean --rollout.temperature?"),
        (["--dtype", "fp32"], "got 'fp32'; did you mean 'float32'?"),
        (["--dtype", "BF16"], "got 'BF16'; did you mean 'bfloat16'?"),
        (["--optim.lr", "fast"], "argument --optim.lr: must be a number or auto; got 'fast'"),
        (["--optim.lr", "nan"], "argument --optim.lr: must be a number or auto; got 'nan'"),
        (["--steps", "3.5"], "argument --steps: must be a whole number; got '3.5'"),
        (["--optim.name", "adam"], "must be one of adamw, schedule-free; got 'adam'; did you mean 'adamw'?"),
        (["--log.report", "maybe"], "argument --log.report: must be true or false; got 'maybe'"),
        (["--optim.betas", "0.9"], "argument --optim.betas: must be 2 values, X,X; got '0.9'"),
        (["--optim.betas", "0.9,x"], "argument --optim.betas: must be a number; got 'x' in '0.9,x'"),
        (["--optim.lr"], "argument --optim.lr: expected one argument"),
        (["--loss.beta"], "argument --loss.beta: expected one argument"),
        (["--loss.beta", "--steps", "3"], "argument --loss.beta: expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(*args)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_has_every_setting_its_text_and_its_default():
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, Config)
    text = " ".join(parser.format_help().split())
    for leaf in settings.leaves(Config).values():
        assert leaf.flag in text
        assert leaf.doc, f"{leaf.path} has no docstring"
        assert leaf.doc.replace(" ", "")[:30] in text.replace(" ", "")
    for shown in (
        "3e-5 for an adapter of one (default: auto)",
        "--optim.lr X|auto",
        "(default: 0.9,0.95)",
        "{adamw,schedule-free}",
        "--loss.KEY VALUE",
    ):
        assert shown in text


def test_help_joins_lines_and_bears_a_percent_sign():
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, Outer)
    text = " ".join(parser.format_help().split())
    assert "a rate of 50 % (default: 0.5)" in text
    assert "middle.inner:" in text
    assert "--label TEXT a label (default: none)" in text


# ---- files


def test_flags_over_file_over_defaults(tmp_path):
    text = "steps: 5\nrollout: {samples: 4, prompts: 2}\nloss: {beta: 1e-3, high: 0.3}\noptim:\n"
    config = from_text(tmp_path, text, **{"rollout.samples": "16", "loss.high": "0.4"})
    rollout = RolloutConfig(samples=16, prompts=2)
    assert config == Config(steps=5, rollout=rollout, loss={"beta": 1e-3, "high": 0.4})
    assert isinstance(config.loss["beta"], float)


def test_an_empty_file_and_none_are_the_defaults(tmp_path):
    assert from_text(tmp_path, "# nothing\n") == Config() == settings.build(Config)


def test_numbers_in_yaml(tmp_path):
    text = "steps: 3.0\noptim: {lr: 1e-3, betas: [0, 1e-1], weight_decay: '5e-2', max_grad_norm: .inf}\n"
    config = from_text(tmp_path, text)
    assert config.steps == 3
    assert isinstance(config.steps, int)
    assert config.optim == OptimConfig(lr=1e-3, betas=(0.0, 0.1), weight_decay=0.05, max_grad_norm=float("inf"))
    assert all(isinstance(x, float) for x in config.optim.betas)


def test_dotted_keys_and_none(tmp_path):
    config = from_text(tmp_path, "rollout.samples: 4\nlog: {wandb: none, view: none}\ntask: {chat: null}\nloss.beta: 1")
    assert (config.rollout.samples, config.log.wandb, config.log.view) == (4, None, "none")
    assert config.loss == {"beta": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {temprature: 1}", "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"),
        ("rolout: {temperature: 1}", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("temperature: 1", "unknown key 'temperature'; did you mean 'rollout.temperature'?"),
        ("optim: {learning_rate: 1}", "unknown key 'optim.learning_rate'; did you mean 'optim.lr'?"),
        ("num_generations: 8", "unknown key 'num_generations'; did you mean 'rollout.samples'?"),
        ("kl_coef: 8", "unknown key 'kl_coef'; did you mean 'loss.beta'?"),
        ("lora_rank: 8", "unknown key 'lora_rank'; did you mean 'peft.options.r'?"),
        ("checkpoint: {xyzzy: 1}", "unknown key 'checkpoint.xyzzy'; known: checkpoint.every, checkpoint.keep, "),
        ("1: 2", "unknown key '1'"),
        ("optim: {lr: fast}", "optim.lr must be a number or auto; got 'fast'"),
        ("optim: {lr: true}", "optim.lr must be a number; got True"),
        ("optim: {lr: [1]}", "optim.lr must be a number; got [1]"),
        ("optim: {lr: null}", "optim.lr must be a number; got None"),
        ("optim: {lr: .nan}", "optim.lr must be a number; got nan"),
        ("optim: {lr: 1" + "0" * 400 + "}", "optim.lr must be a number; got 1000"),
        ("optim: {betas: 0.9}", "optim.betas must be 2 values"),
        ("optim: {betas: [0.9, x]}", "optim.betas must be a number; got 'x' in [0.9, 'x']"),
        ("optim: {name: 3}", "optim.name must be one of adamw, schedule-free; got 3"),
        ("optim: 3", "optim must be a section of settings by name; got 3"),
        ("steps: 3.5", "steps must be a whole number; got 3.5"),
        ("steps: true", "steps must be a whole number; got True"),
        ("steps: '3'", "steps must be a whole number; got '3'"),
        ("steps: .inf", "steps must be a whole number; got inf"),
        ("log: {report: 1}", "log.report must be true or false; got 1"),
        ("log: {report: 'true'}", "log.report must be true or false; got 'true'"),
        ("output: 2024", "output must be text (in quotes, if need be); got 2024"),
        ("loss: 3", "loss must be settings by name; got 3"),
        ("loss: {1: 2}", "loss must be settings by name; got {1: 2}"),
        ("- steps", "must hold settings by name (key: value); got a list"),
        ("steps", "must hold settings by name (key: value); got a str"),
        ("steps: 1\nseed: [1\noutput: x\n", "line 3: "),
        ("steps: 1\nsteps: 2\n", "line 2: 'steps' is given twice"),
        ("rollout: {samples: 2}\nrollout.samples: 2\n", "rollout.samples is given twice"),
        ("a: !!python/object:os.system x", "line 1: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("a: 2020-99-99", "month must be in 1..12"),
        ("a: \x07", "character 4: special characters are not allowed"),
        ("[" * 5000, "is nested too deeply"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    assert message in refused(from_text, tmp_path, text)


def test_the_file_is_named(tmp_path):
    text = refused(from_text, tmp_path, "rollout: {temprature: 1}")
    wanted = "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"
    assert text == f"{tmp_path / 'a.yaml'}: {wanted}"


def test_files_that_cannot_be_read(tmp_path):
    assert refused(settings.build, Config, file=tmp_path / "none.yaml").endswith("none.yaml: no such file")
    assert "cannot be read: Is a directory" in refused(settings.build, Config, file=tmp_path)
    (tmp_path / "a.yaml").write_bytes(b"output: \xff")
    assert "is not UTF-8 text" in refused(settings.build, Config, file=tmp_path / "a.yaml")


def test_what_others_call_a_setting_leads_to_one_of_ours():
    own = {path.rpartition(".")[2] for path in settings.leaves(Config)}
    seen: set[str] = set()
    for path, others in Config.other_names.items():
        if path != "resume":
            settings.build(Config, flags={path: settings.flat(Config()).get(path, 1)})
        assert not set(others.split()) & (own - {"method"} | seen), path
        seen |= set(others.split())


def test_what_others_set_and_we_do_not_is_explained():
    assert refused(settings.change, Config(), {"logging_steps": 1}).startswith(
        "unknown setting 'logging_steps': every step is logged"
    )
    assert not set(Config.not_set) & set(" ".join(Config.other_names.values()).split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("-k", "unknown option -k; did you mean --k?"),
        ("-o", "unknown option -o; did you mean --output?"),
        ("-n", "unknown option -n; did you mean --rollout.samples?"),
        ("-s", "unknown option -s"),  # seed, or steps
        ("-LR", "unknown option -LR; did you mean --optim.lr?"),
        ("lr=1e-4", "unrecognized argument lr=1e-4; did you mean --optim.lr 1e-4?"),
        ("loss.beta=0", "unrecognized argument loss.beta=0; did you mean --loss.beta 0?"),
        ("what", "unrecognized argument what"),
    ],
)
def test_what_was_perhaps_meant_as_a_flag(given, said):
    flags = [
        "-h",
        "--k",
        *(f"{leaf.flag}.KEY" if leaf.open else leaf.flag for leaf in settings.leaves(Config).values()),
    ]
    assert settings.unknown_argument(given, flags, Config) == said


def test_a_function_is_given_by_its_name():
    assert "a function by its name, file.py:name, as it runs in processes of its own; got <built-in" in refused(
        settings.change, Config(), {"task": {"reward": len}}
    )


def test_wrong_flags_given_to_build():
    assert (
        refused(settings.build, Config, flags={"Optim.LR": 1}) == "unknown option --Optim.LR; did you mean --optim.lr?"
    )
    unknown = "unknown option --rollout.temprature; did you mean --rollout.temperature?"
    assert refused(settings.build, Config, flags={"rollout.temprature": 1}) == unknown
    assert (
        refused(settings.build, Config, flags={"optim.lr": "fast"}) == "optim.lr must be a number or auto; got 'fast'"
    )
    assert "loss.beta must be a YAML value" in refused(settings.build, Config, flags={"loss.beta": "[1"})


# ---- ranges


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"steps": -1}, "steps must be at least 0; got -1"),
        ({"rollout.samples": 0}, "rollout.samples must be at least 1; got 0"),
        ({"rollout.temperature": 0}, "rollout.temperature must be positive; got 0.0"),
        ({"eval.temperature": -1}, "eval.temperature must be at least 0; got -1.0"),
        ({"rollout.top_p": 0}, "rollout.top_p must be above 0 and at most 1; got 0.0"),
        ({"eval.top_p": 1.5}, "eval.top_p must be above 0 and at most 1; got 1.5"),
        ({"rollout.min_p": 1.5}, "rollout.min_p must be from 0 to 1; got 1.5"),
        ({"optim.lr": float("inf")}, "optim.lr must be at least 0; got inf"),
        ({"optim.betas": (0.9, 1.0)}, "optim.betas must be at least 0 and below 1; got 0.9, 1.0"),
        ({"reference.decay": 1}, "reference.decay must be at least 0 and below 1; got 1.0"),
        ({"checkpoint.keep": -1}, "checkpoint.keep must be at least 0; got -1"),
        ({"optim.minibatches": 257}, "optim.minibatches must be at most rollout.prompts × samples, 256; got 257"),
        ({"optim.name": "schedule-free", "optim.schedule": "cosine"}, "optim.schedule must be constant with schedule-"),
        ({"optim.name": "schedule-free", "optim.betas": (0, 0.9)}, "optim.betas must start above 0 with schedule-free"),
        (
            {"rollout.overlong": True, "rollout.overlong_tokens": 9, "rollout.max_new_tokens": 8},
            "rollout.overlong_tokens must be at most max_new",
        ),
        ({"output": " "}, "output must not be empty"),
        ({"task.on_error": float("-inf")}, "task.on_error must be finite; got -inf"),
    ],
)
def test_ranges(flags, message):
    assert refused(settings.build, Config, flags=flags).startswith(message)


def test_auto_is_bfloat16_where_the_device_has_it(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert pick_dtype("auto", cpu) == torch.float32
    assert pick_dtype("bfloat16", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for able in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, able=able: able)
        assert pick_dtype("auto", gpu) == (torch.bfloat16 if able else torch.float32)
        assert pick_dtype("float32", gpu) == torch.float32


def test_the_ends_of_the_ranges_are_allowed():
    rollout = RolloutConfig(prompts=1, samples=1, top_p=1.0, overlong=True, overlong_tokens=64)
    Config(
        steps=0, rollout=rollout, optim=OptimConfig(lr=0.0, minibatches=1), eval=EvalConfig(temperature=0.0, every=0)
    )
    Config(optim=OptimConfig(minibatches=256), checkpoint=CheckpointConfig(every=0, keep=1))


# ---- and back


def test_yaml_is_complete_and_in_order():
    text = settings.to_yaml(Config(loss={"beta": 1e-5}))
    names = [line.split(":")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    assert names == [f.name for f in fields(Config)]
    assert "  betas: [0.9, 0.95]\n" in text
    assert "\noptim:\n  name: adamw\n  lr: auto\n" in text
    assert text.startswith("algorithm: rpg-reinforce-urkl\nloss:\n  beta: 1.0e-05\n")


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda x: x.lower() not in ("none", "null")
)
awkward = st.sampled_from(
    ["1e-3", "1", "true", "null", "~", "- a", "a: b", "#x", "'", '"', "{prompt}", " a ", "a\n\n b\n"]
)
finite = st.floats(min_value=0, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | awkward,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3),
    max_leaves=5,
)
configs = st.builds(
    Config,
    loss=st.dictionaries(texts | awkward, values, max_size=4),
    algorithm=texts | awkward,
    steps=st.integers(0, 10**9),
    task=st.builds(TaskConfig, reward=st.none() | texts, timeout=st.floats(1e-300, 1e6), workers=st.just(2)),
    optim=st.builds(
        OptimConfig,
        lr=finite,
        betas=st.tuples(*2 * [st.floats(0, 1, exclude_max=True)]),
        weight_decay=finite,
        name=st.just("adamw"),
        warmup=st.just(0),
        **{name: st.just(1) for name in ("max_grad_norm", "minibatches", "epochs", "micro_tokens", "max_bad_steps")},
    ),
)


@given(configs)
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_yaml_round_trips_exactly(tmp_path, config):
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml(config), encoding="utf-8", newline="")
    again = settings.build(Config, file=file)
    assert again == config
