"""What RPGConfig and RPGTrainer refuse, in one line that names the fix; rewards to advantages."""

import importlib
import importlib.metadata
import re
import warnings

import accelerate
import pytest
import torch
from datasets import Dataset

import tiny

pytest.importorskip("trl")

import trl

import rpg
from integrations.trl_fixed import config
from rpg.console import install
from rpg.integrations.trl import RPGConfig, RPGTrainer
from rpg.integrations.trl.config import DECIDED
from rpg.integrations.trl.reference import TRLReference
from rpg.integrations.trl.scores import GenerationScores, total_reward
from rpg.integrations.trl.setup import signal_function
from rpg.integrations.trl.trainer import _sharding
from rpg.loss.advantages import Advantage
from rpg.run.config import ReferenceConfig

OTHER = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "none",
    "vllm_importance_sampling_mode": "token_mask",
    "use_bias_correction_kl": False,
}


def make(folder, args=None, algorithm=None, **settings):
    return RPGTrainer(
        tiny.make("llama"),
        lambda completions, **_: [0.0] * len(completions),
        args or config(str(folder), per_device_train_batch_size=8, **settings),
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * 8}),
        processing_class=tiny.tokenizer(),
        algorithm=algorithm,
    )


@pytest.mark.parametrize("name", DECIDED)
def test_what_the_algorithm_decides_is_not_set_twice(tmp_path, name):
    default = next(f.default for f in RPGConfig.__dataclass_fields__.values() if f.name == name)
    value = OTHER[name] if name in OTHER else True if default is False else (default or 0) + 0.5
    with pytest.raises(ValueError, match=f"{name}=.* is decided by the algorithm here: set ") as error:
        config(str(tmp_path), **{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "capo"}, "capo cannot run in TRL: its gate needs logits"),
        ({"algorithm": "distill"}, "distill cannot run in TRL: it learns from a teacher"),
        ({"algorithm": "remax"}, "remax cannot run in TRL: its baseline is the reward of a greedy response"),
        ({"algorithm": "dap"}, "unknown algorithm 'dap'. Did you mean 'dapo'"),
        ({"algorithm": "dapo", "loss": {"hihg": 1}}, "unknown option of 'dapo' 'hihg'. Did you mean 'high'"),
        ({"algorithm": "dapo", "loss": {"high": "x"}}, "dapo cannot have loss={'high': 'x'}"),
        ({"algorithm": "dapo", "loss": {"mismatch": "tiss"}}, "Did you mean 'tis'"),
        ({"algorithm": "dapo", "loss": {"mismatch": "tis"}}, "needs the sampler's own log-probabilities: use_vllm"),
        ({"algorithm": "dapo", "loss": {"reduction": "none"}}, "leaves no number to differentiate"),
        ({"algorithm": "rloo", "loss": {"advantage": "reward-to-go"}}, "an advantage per token needs"),
        ({"loss": {"control_variate": True}, "gradient_accumulation_steps": 2}, "control_variate is fitted to the who"),
        ({"max_completion_length": 8}, "overlong_tokens must be below max_completion_length, 8; got 16"),
        ({"reference_update": "often"}, "unknown reference_update 'often'"),
        ({"reference_every": 0}, "reference_every must be positive"),
        ({"reference_decay": 1.0}, "reference_decay must be at least 0 and below 1"),
        ({"loss": [1]}, "loss must be the options of the preset"),
    ],
)
def test_refused_in_one_line(tmp_path, settings, message):
    with pytest.raises(ValueError) as error:
        make(tmp_path, **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_clip_that_fits_itself_needs_the_whole_step(tmp_path):
    rule = rpg.PolicyLoss(clip=rpg.clip.Adaptive(target_ess=0.9))
    with pytest.raises(ValueError, match="Adaptive is fitted to the whole optimiser step, which here is 4 micro"):
        make(tmp_path, algorithm=rule, gradient_accumulation_steps=4)
    assert make(tmp_path, algorithm=rule).algorithm.loss is rule


def test_sharded_references(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="reference_update=ema with FSDP: the reference's shards cannot be renewed"):
        make(tmp_path, algorithm="grpo", reference_update="ema")


@pytest.mark.parametrize("setting", [True, "full_shard"])
def test_a_model_that_trainer_shards_itself(tmp_path, monkeypatch, setting):
    """The environment variable is set later, by Trainer."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    with pytest.raises(ValueError, match="reference_update=every with FSDP: the reference's shards cannot be renewed"):
        make(tmp_path, algorithm="grpo", reference_update="every", fsdp=setting)


def test_a_model_that_deepspeed_shards(tmp_path):
    for stage in (2, 3):
        args = config(str(tmp_path), algorithm="grpo", reference_update="every")
        args.deepspeed_plugin = accelerate.DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage}})
        assert _sharding(args) == ("DeepSpeed ZeRO-3" if stage == 3 else None)


def test_an_algorithm_given_twice(tmp_path):
    with pytest.raises(
        ValueError, match="RPGConfig has algorithm='dapo' and RPGTrainer algorithm='grpo': give it once"
    ):
        make(tmp_path, config(str(tmp_path), algorithm="dapo"), algorithm="grpo")
    with pytest.raises(
        ValueError, match="RPGConfig has algorithm='dapo' and RPGTrainer algorithm='grpo': give it once"
    ):
        make(tmp_path, config(str(tmp_path), algorithm="dapo"), algorithm=rpg.algorithm("grpo"))
    with pytest.raises(ValueError, match=r"pass objects as RPGTrainer\(algorithm=…\)"):
        config(str(tmp_path), algorithm=rpg.algorithm("dapo"))
    args = config(str(tmp_path), per_device_train_batch_size=8)
    for name in ("dapo", "gspo"):  # settings used again
        made = make(tmp_path, args, algorithm=name)
        assert (made.algorithm.name, made.args.algorithm, made.args.to_dict()["algorithm"]) == (name, name, name)
    assert make(tmp_path, config(str(tmp_path), algorithm="rloo", per_device_train_batch_size=8), "rloo")


def test_algorithms_as_objects(tmp_path):
    made = rpg.algorithm("dapo", high=0.3)
    assert make(tmp_path, algorithm=made).algorithm is made
    with pytest.raises(ValueError, match="but algorithm= is an object: change the object"):
        make(tmp_path, algorithm=made, loss={"high": 0.1})
    with pytest.raises(TypeError, match="must be a preset's name, an Algorithm or a PolicyLoss"):
        make(tmp_path, algorithm=3)
    assert make(tmp_path, algorithm="dr-grpo", max_completion_length=77).algorithm.loss.constant == 77
    with pytest.raises(TypeError, match=r"args must be an rpg.integrations.trl.RPGConfig; got GRPOConfig"):
        make(tmp_path, trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_liger_is_off_with_a_message(tmp_path):
    with pytest.warns(UserWarning, match="use_liger_kernel is switched off: rpg's losses need per-token log-prob"):
        args = config(str(tmp_path), use_liger_kernel=True)
    assert not args.use_liger_kernel


def test_messages_at_the_start(tmp_path, caplog):
    make(tmp_path)
    assert "no others are sampled in their place" in caplog.text
    assert "another objective" not in caplog.text
    caplog.clear()
    make(tmp_path, top_p=0.9, generation_kwargs={"min_p": 0.1})
    assert "top_p=0.9 min_p=0.1: the loss compares the whole policy with a truncated sampler" in caplog.text
    caplog.clear()
    make(tmp_path, algorithm="reinforce", num_iterations=2, reference_update="kl")
    assert "only the first of 2 optimiser steps on a generation is on-policy" in caplog.text
    assert "reference_update=kl has no effect: reinforce has no KL term" in caplog.text


def test_without_trl_or_with_another_version(monkeypatch):
    import rpg.integrations.trl as package

    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("rpg.integrations.versions.version", gone)
    with pytest.raises(ImportError, match=re.escape(install("rpg-rl[trl]"))):
        importlib.reload(package)
    monkeypatch.setattr("rpg.integrations.versions.version", lambda name: "1.20.0")
    with pytest.raises(ImportError, match=r"was tested with trl >=1.16,<1.17"):
        importlib.reload(package)


# ---- rewards -> advantages -------------------------------------------------------------------------------------------


def test_rewards_of_several_functions():
    nan = torch.nan
    rewards_NF = torch.tensor([[1.0, nan], [0.0, 2.0], [nan, nan], [1.0, 4.0]])
    weight_F = torch.tensor([1.0, 0.5])
    found = total_reward(rewards_NF, weight_F, 2, normalised=False)
    assert found.tolist()[:2] + found.tolist()[3:] == [1.0, 1.0, 3.0]
    assert found[2].isnan()
    rewards_NF = torch.tensor([[1.0, 100.0], [0.0, 300.0], [5.0, 0.0], [5.0, 0.0]])
    found = total_reward(rewards_NF, weight_F, 2, normalised=True)
    expected = [0.5**0.5 - 0.5 * 0.5**0.5, -(0.5**0.5) + 0.5 * 0.5**0.5, 0.0, 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)


def test_what_is_left_out_is_in_no_baseline():
    nan = torch.nan
    reward_N = torch.tensor([1.0, 0.0, nan, 2.0, 2.0, 2.0, 3.0, nan, nan])
    scores = GenerationScores(reward_N, torch.zeros(9), torch.arange(9) // 3)
    advantage_N, keep_N = scores.advantages(Advantage("leave-one-out"), dynamic=True)
    assert keep_N.tolist() == [True, True, *[False] * 7]
    assert advantage_N.tolist() == [1.0, -1.0, *[0.0] * 7]
    advantage_N, keep_N = scores.advantages(Advantage("group-mean"), dynamic=False)
    assert keep_N.tolist() == [True, True, False, True, True, True, True, False, False]
    penalty_N = torch.tensor([0.0, 0, 0, -1.0, 0, 0, 0, 0, 0])
    scores = GenerationScores(reward_N, penalty_N, torch.arange(9) // 3)
    assert not scores.advantages(Advantage("group-mean"), dynamic=True)[1][3]  # a penalty alone is no signal
    advantage_N, _ = scores.advantages(Advantage("group-mean"), dynamic=False)
    assert advantage_N[3:6].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    nothing, keep_N = GenerationScores(torch.ones(4), torch.zeros(4), torch.arange(4) // 2).advantages(
        Advantage("batch-whitening"), dynamic=True
    )
    assert not keep_N.any()
    assert not nothing.any()


def test_groups_that_differ_in_form_alone_have_no_signal():
    reward_N, group_N = torch.tensor([0.0, 0.2, 1.0, 0.0, 1.0, 1.2]), torch.arange(6) // 2
    by_reward = GenerationScores(reward_N, torch.zeros(6), group_N)
    assert by_reward.advantages(Advantage("group-mean"), dynamic=True)[1].all()
    correct_N = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    scores = GenerationScores(reward_N, torch.zeros(6), group_N, correct_N)
    advantage_N, keep_N = scores.advantages(Advantage("group-mean"), dynamic=True)
    assert keep_N.tolist() == [False, False, True, True, False, False]
    assert advantage_N[2:4].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("by", "names", "which"),
    [
        ("auto", ["style"], None),
        ("auto", ["style", "correct"], 1),
        ("auto", ["accuracy_reward", "style"], 0),
        ("reward", ["correct"], None),
        ("style", ["correct", "style"], 1),
    ],
)
def test_which_function_tells_groups_with_signal(tmp_path, by, names, which):
    assert signal_function(config(str(tmp_path), dynamic_by=by), names) == which
    with pytest.raises(ValueError, match=r"unknown dynamic_by 'corect'. Did you mean 'correct'"):
        signal_function(config(str(tmp_path), dynamic_by="corect"), ["correct"])


def test_iterations_are_generations(tmp_path):
    """Every second one; the KL is the mean of its optimiser steps."""
    rule = {"update": "every", "every": 2, "count": "iterations"}
    held = TRLReference(tiny.make("llama"), "every", ReferenceConfig(**rule), adapted=False)
    ends = [False, True, False, True, False, True, False, True]  # two optimiser steps on each
    assert [held.after_step(i, 0.1, end) for i, end in enumerate(ends, 1)] == [False, False, False, True] * 2
    by_kl = TRLReference(tiny.make("llama"), "kl", ReferenceConfig("kl", count="iterations"), adapted=False)
    assert not by_kl.after_step(1, 0.02, False)
    by_kl.save(tmp_path)
    again = TRLReference(tiny.make("llama"), "kl", ReferenceConfig("kl", count="iterations"), adapted=False)
    again.load(tmp_path)
    assert again.after_step(2, 0.09, True)  # (0.02 + 0.09)/2 > 0.05
    other = TRLReference(tiny.make("llama"), "kl", ReferenceConfig("kl", count="optimizer-steps"), adapted=False)
    with pytest.raises(ValueError, match="set reference_count=iterations to resume"):
        other.load(tmp_path)


def test_what_a_fixed_baseline_makes_of_rewards_is_said(tmp_path, caplog):
    make(tmp_path, algorithm="topr")
    assert "topr: it is for rewards of -1 … 1, and takes yours as they come" in caplog.text
    caplog.clear()
    made = make(tmp_path, algorithm="topr", loss={"advantage": {"reward_range": [0, 1]}})
    assert "topr: rewards of 0 … 1 are mapped to -1 … 1" in caplog.text
    assert made.method.advantage.reward_range == (0.0, 1.0)
    with pytest.raises(ValueError, match="otb cannot run in TRL: its baseline needs Σπ²"):
        make(tmp_path, algorithm="otb")
    assert make(tmp_path, algorithm="dr-grpo", loss={"constant": "longest"}).method.loss.constant == 512


def test_the_configs_of_a_command_line(tmp_path):
    """What TRL's own parser makes of flags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags = f"--output_dir {tmp_path} --algorithm dapo --use_cpu --bf16 false --loss".split()
        (args,) = trl.TrlParser(RPGConfig).parse_args_and_config([*flags, '{"high": 0.3}'])
    assert args.algorithm == "dapo"
    assert args.loss == {"high": 0.3}
