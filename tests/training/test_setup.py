"""What the settings of a method are made into, and what is said of mistakes in them."""

import pytest
import torch

import rpg
from rpg.export.recipe import loss_options
from rpg.loss.gates import BY_NAME
from rpg.run.config import Config, ReferenceConfig, RolloutConfig
from rpg.training.setup import algorithm_of, method_of, pick_device, warnings_about

MISTAKES = [
    ("high-entropy", {"share": "abc"}, "loss.share must be a number; got 'abc'"),
    ("high-entropy", {"share": 2}, "loss.share must be in (0, 1]"),
    ("grpo", {"entropy_bonus": "abc"}, "loss.entropy_bonus must be a number; got 'abc'"),
    ("grpo", {"max_log_ratio": None}, "loss.max_log_ratio must be a number; got None"),
    ("grpo", {"kl_to_go": "abc"}, "loss.kl_to_go must be true or false; got 'abc'"),
    ("dapo", {"high": "x"}, "loss.high must be a number; got 'x'"),
    ("gpg", {"min_signal": True}, "loss.min_signal must be a number; got True"),
    ("grpo", {"beta": -1}, "loss.beta must be at least 0; got -1"),
    ("grpo", {"divergence": "kkl"}, "unknown loss.divergence 'kkl'"),
    ("grpo", {"advantage.beta": "abc"}, "loss.advantage.beta must be a number; got 'abc'"),
    ("grpo", {"advantage": {"beta": "abc"}}, "loss.advantage.beta must be a number; got 'abc'"),
    ("grpo", {"advantage.beta": -1}, "loss.advantage.beta must be at least 0; got -1"),
    ("grpo", {"advantage": "group-mea"}, "unknown loss.advantage.kind 'group-mea'. Did you mean 'group-mean'?"),
    ("ppo", {"advantage.over": "token"}, "unknown loss.advantage.over 'token'"),
    ("topr", {"advantage.reward_range": "1,0"}, "loss.advantage.reward_range must go from"),
    ("clip-cov", {"cov_low": 9}, "give loss.cov_low < cov_high"),
    ("grpo", {"gate": "high-entrpy"}, "unknown loss.gate 'high-entrpy'. Did you mean 'high-entropy'?"),
    ("gspo", {"gate": "high-entropy"}, "loss.gate needs level='token'"),
    ("grpo", {"reference": "x"}, "unknown loss.reference 'x'"),  # it has its name already
    ("grpo", {"loss": 3}, "grpo cannot have loss.loss=3"),
    ("clip-cvo", {}, "unknown algorithm 'clip-cvo'"),
]


@pytest.mark.parametrize(("name", "loss", "text"), MISTAKES)
def test_a_mistake_in_an_option_names_the_setting(name, loss, text):
    with pytest.raises(ValueError) as error:
        algorithm_of(Config(algorithm=name, loss=loss))
    assert str(error.value).startswith(text)


def test_a_preset_named_as_an_option_is_not_taken_for_it():
    with pytest.raises(ValueError, match=r"^clip-cov compares the responses to a prompt"):
        algorithm_of(Config(algorithm="clip-cov", rollout=RolloutConfig(samples=1)))


def test_whole_numbers_and_none_are_numbers_where_they_may_be():
    chosen = algorithm_of(Config(algorithm="dapo", loss={"high": 1, "low": None, "constant": None}))
    assert chosen.loss.clip == rpg.clip.Box(None, 1)


def test_a_gate_by_its_name_on_another_preset():
    chosen = algorithm_of(Config(algorithm="grpo", loss={"gate": "high-entropy", "share": 0.3}))
    assert chosen.loss == rpg.algorithm("grpo", gate=rpg.gates.HighEntropy(0.3)).loss
    without = Config(algorithm="high-entropy", loss={"gate": "none", "mismatch": "none"})
    assert algorithm_of(without).loss.gate is None
    assert loss_options(without, method_of(without)) == {"gate": None, "mismatch": None}  # as the engines take it
    for name, gate in BY_NAME.items():
        assert rpg.algorithm(name).loss.gate == gate


@pytest.mark.parametrize(
    ("algorithm", "settings", "text"),
    [
        ("dapo", {"rollout": RolloutConfig(min_signal=0.5)}, "rollout.min_signal=0.5 has no effect: dynamic"),
        ("gpg", {"rollout": RolloutConfig(min_signal=0.5, dynamic_by="reward")}, None),
        ("dapo", {"rollout": RolloutConfig(dynamic_by="reward")}, None),
        ("grpo", {"rollout": RolloutConfig(dynamic_by="reward")}, "rollout.dynamic_by=reward has no effect"),
        ("grpo", {"rollout": RolloutConfig(top_k=1)}, "rollout.top_k=1 always takes"),
        ("grpo", {"rollout": RolloutConfig(min_p=1.0)}, "rollout.min_p=1 always takes"),
        ("grpo", {"rollout": RolloutConfig(top_k=2, min_p=0.5)}, None),
        ("grpo", {"reference": ReferenceConfig(count="optimizer-steps")}, "the KL's anchor is frozen"),
        ("rpg-urkl", {"reference": ReferenceConfig(count="optimizer-steps")}, "the KL's anchor is old"),
        ("grpo", {"reference": ReferenceConfig("every", count="optimizer-steps")}, None),
        ("grpo", {"reference": ReferenceConfig("kl", count="optimizer-steps")}, None),  # its smoothing counts them
        ("dapo", {"loss": {"gate": "kl-cov"}}, "loss.gate=KLCov has no effect"),
        ("kl-cov", {}, None),
    ],
)
def test_settings_without_effect_are_told(algorithm, settings, text):
    config = Config(algorithm=algorithm, **settings)
    told = [line for line in warnings_about(method_of(config), config) if "importance weights" not in line]
    assert len(told) == (text is not None)
    assert text is None or text in told[0]


def test_a_range_that_rewards_are_not_mapped_from_is_told():
    method = rpg.algorithm("grpo", advantage={"mapped_to": (-1, 1)}).resolve()
    assert "takes yours as they come" in method.remarks(None)[0]


def test_what_a_teacher_does_not_go_with():
    with pytest.raises(ValueError, match=r"reference\.update must be auto or frozen with reference\.model"):
        Config(reference=ReferenceConfig("ema", model="teacher"))
    with pytest.raises(ValueError, match=r"distill learns from a teacher: name it with --reference\.model"):
        method_of(Config(algorithm="distill"))
    config = Config(algorithm="dapo", reference=ReferenceConfig(model="teacher"))
    assert "reference.model=teacher has no effect: dapo has no KL term" in list(
        warnings_about(method_of(config), config)
    )
    for name, anchor in (("distill", "frozen"), ("rpg-urkl", "frozen"), ("grpo", "frozen"), ("warp", "frozen")):
        assert method_of(Config(algorithm=name, reference=ReferenceConfig(model="t"))).anchor == anchor


@pytest.fixture
def apples_gpu(monkeypatch):
    """A machine with Apple's GPU, which holds every type but float64; yields what it can hold."""
    there, empty = {torch.float32}, torch.empty

    def on_mps(*size, dtype=torch.float32, device=None):
        if torch.device(device).type == "mps" and dtype not in there:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_mps)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return there


def test_a_gpu_that_cannot_draw_tokens_is_left_alone_and_refused_by_name(apples_gpu):
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"^device 'mps' has no float64, in which tokens are drawn: --device cpu runs"):
        pick_device("mps")


def test_one_that_can_comes_after_cuda_and_before_the_cpu(apples_gpu, monkeypatch):
    apples_gpu.add(torch.float64)
    assert pick_device("auto").type == pick_device("mps").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == "cuda"
