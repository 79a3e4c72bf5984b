"""Every mistake gets one line that names the argument."""

import math

import pytest
import torch

import rpg
from rpg import PolicyLoss, clip, gates, vocabulary_kl
from rpg.loss.mismatch import TIS, Mismatch

B, T = 3, 4
NAMES = ("logp", "old_logp", "advantages", "mask")
PRINTED = {"through_advantage": True, "estimator": "differentiable", "clip": clip.DualClip()}


def batch(**changes):
    logp = -torch.rand(B, T) - 0.1
    given = {"logp": logp, "old_logp": logp - 0.1, "advantages": torch.ones(B), "mask": torch.ones(B, T)} | changes
    return [given.pop(name) for name in NAMES], given


def one_line(error, *names):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    for name in names:
        assert name in text


def refuse(names, loss=PolicyLoss(), kind=ValueError, **changes):  # noqa: B008
    args, kwargs = batch(**changes)
    with pytest.raises(kind) as error:
        loss(*args, **kwargs).metrics  # noqa: B018
    one_line(error, *names.split())


# ---- the batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(B,), (T,), (B, T, 1), (B, T + 1), (B + 1, T), (1, T), (B, 1), ()])
@pytest.mark.parametrize(
    "name",
    ["old_logp", "mask", "ref_logp", "rollout_logp", "exact_kl", "entropy", "keep", "score_sq", "chosen", "state_kl"],
)
def test_wrong_shapes(name, shape):
    loss = PolicyLoss(control_variate=name == "score_sq")
    refuse(f"{name} {[B, T]} {list(shape)}", loss, **{name: torch.ones(shape)})


@pytest.mark.parametrize("shape", [(B,), (B, T, 1), ()])
def test_wrong_shape_of_logp(shape):
    refuse(f"logp [B,T] {list(shape)}", logp=-torch.ones(shape))


@pytest.mark.parametrize("shape", [(T,), (1,), (B, 1), (1, T), (B, T, 1), (B, T + 1), ()])
def test_wrong_shape_of_advantages(shape):
    refuse(f"advantages {[B]} {[B, T]} {list(shape)}", advantages=torch.ones(shape))


@pytest.mark.parametrize("level", ["sequence", "sequence-mean"])
def test_sequence_levels_take_one_number_per_response(level):
    loss = PolicyLoss(level=level)
    refuse(f"advantages {[B]} {level}", loss, advantages=torch.ones(B, T))
    refuse(f"keep {[B]}", loss, keep=torch.ones(B, T))
    refuse(f"score_sq {[B]}", loss, score_sq=torch.ones(B, T))
    refuse("exact_kl level='token'", loss, exact_kl=torch.ones(B, T))


@pytest.mark.parametrize("shape", [(B + 1,), (B, 1), (B, T), ()])
def test_wrong_shape_of_groups(shape):
    refuse(f"groups {[B]} {list(shape)}", PolicyLoss(control_variate=True), groups=torch.zeros(shape).long())


@pytest.mark.parametrize("name", ["logp", "old_logp", "ref_logp", "rollout_logp"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integer_log_probabilities(name, dtype):
    refuse(f"{name} floating-point {dtype}", kind=TypeError, **{name: torch.ones(B, T).to(dtype)})


@pytest.mark.parametrize("name", [*NAMES, "ref_logp", "rollout_logp"])
def test_not_a_tensor(name):
    value = [1.0] * B if name == "advantages" else [[1.0] * T] * B
    refuse(f"{name} tensor list", kind=TypeError, **{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_none_where_a_tensor_is_needed(name):
    refuse(f"{name} tensor NoneType", kind=TypeError, **{name: None})


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, math.nan])
def test_masks_that_are_weights(value):
    mask = torch.ones(B, T)
    mask[0, 0] = value
    refuse("mask", mask=mask)
    if value in (2.0, -1.0):
        refuse("mask", mask=mask.long())


def test_masks_of_any_type():
    args, _ = batch()
    want = PolicyLoss()(*args).loss
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float64, torch.bfloat16):
        assert torch.equal(PolicyLoss()(*args[:3], args[3].to(dtype)).loss, want)


def test_nothing_selected():
    refuse("mask", mask=torch.zeros(B, T))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, torch.tensor(0.0), torch.tensor(-2.0)])
def test_denominators_that_are_not_positive(value):
    refuse("denominator", denominator=value)


def test_denominators_of_more_than_one_number():
    refuse(f"denominator {[B]}", denominator=torch.ones(B))
    with pytest.raises(ValueError) as error:
        PolicyLoss().step_denominator()
    one_line(error, "step_denominator", "mask")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_mass_that_is_not_positive(value):
    refuse("old_mass", old_mass=value)


def test_missing_rollout_logp():
    refuse("mismatch rollout_logp", PolicyLoss(mismatch=TIS()))


def test_token_mismatch_at_sequence_level():
    for options in ({"level": "sequence"}, {"level": "sequence-mean"}, {"kl_to_go": True}):
        with pytest.raises(ValueError) as error:
            PolicyLoss(mismatch=TIS(level="token"), **options)
        one_line(error, "level", "mismatch")
        assert PolicyLoss(mismatch=TIS(level="sequence"), **options).mismatch


def test_what_a_method_needs():
    args, _ = batch()
    for name, missing in {
        "grpo": "ref_logp",
        "grpo-corrected": "ref_logp",
        "reinforce++-baseline": "ref_logp",
        "capo": "keep",
    }.items():
        with pytest.raises(ValueError) as error:
            rpg.algorithm(name).loss(*args)
        one_line(error, missing)
    assert rpg.algorithm("grpo", beta=0.0).loss(*args).loss.isfinite(), "without a KL term there is no anchor"


def test_exact_kl_that_would_be_ignored():
    kl = torch.zeros(B, T).requires_grad_()
    for loss in (
        PolicyLoss("none", 0.0),
        PolicyLoss("urkl", 0.0),
        PolicyLoss("urkl", kl_to_go=True),
        PolicyLoss("urkl", clip=clip.RPGClip(), kl_in_clip=True),
        PolicyLoss("urkl", estimator="differentiable", clip=clip.DualClip(), through_advantage=True),
        PolicyLoss("urkl", gate=gates.KLCov()),
    ):
        refuse("exact_kl", loss, exact_kl=kl)
    refuse("exact_kl gradient", logp=-torch.ones(B, T).requires_grad_(), exact_kl=kl.detach())


def test_a_control_variate_whose_mean_would_not_be_zero():
    refuse("keep control_variate", PolicyLoss(control_variate=True), keep=torch.ones(B, T))
    assert PolicyLoss(control_variate=True, mismatch=Mismatch()).control_variate


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"divergence": "ukl"}, "divergence 'urkl'"),
        ({"divergence": None}, "divergence"),
        ({"estimator": "reinforced"}, "estimator 'reinforce'"),
        ({"level": "tokens"}, "level 'token'"),
        ({"reduction": "token_mean"}, "reduction 'token-mean'"),
        ({"beta": -1e-9}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"max_log_ratio": 0}, "max_log_ratio"),
        ({"max_log_ratio": 81}, "max_log_ratio"),
        ({"max_log_ratio": math.nan}, "max_log_ratio"),
        ({"reduction": "constant"}, "constant reduction"),
        ({"constant": 5}, "constant reduction"),
        ({"reduction": "constant", "constant": 0}, "constant"),
        ({"reduction": "constant", "constant": -3}, "constant"),
        ({"estimator": "differentiable", "clip": clip.Truncate()}, "clip Truncate estimator"),
        ({"estimator": "differentiable", "clip": clip.Unweighted()}, "clip Unweighted estimator"),
        ({"estimator": "differentiable", "clip": clip.Taper()}, "clip Taper estimator"),
        ({"kl_ratio_cap": 0.0}, "kl_ratio_cap"),
        ({"kl_ratio_cap": -1.0}, "kl_ratio_cap"),
        ({"kl_ratio_cap": 3.0, "estimator": "differentiable"}, "kl_ratio_cap estimator"),
        ({"kl_ratio_cap": 3.0, "clip": clip.RPGClip()}, "kl_ratio_cap kl_in_clip"),
        ({"kl_ratio_cap": 3.0, "kl_to_go": True}, "kl_ratio_cap kl_to_go"),
        ({"kl_to_go": True, "divergence": "fkl"}, "kl_to_go divergence"),
        ({"kl_to_go": True, "divergence": "none"}, "kl_to_go divergence"),
        ({"kl_to_go": True, "level": "sequence-mean"}, "kl_to_go level"),
        ({"control_variate": True, "reduction": "seq-mean-token-mean"}, "control_variate"),
        ({"control_variate": True, "reduction": "seq-mean-token-mean", "level": "sequence"}, "control_variate"),
        ({"control_variate": True, "level": "sequence-mean"}, "control_variate"),
        ({"control_variate": True, "mismatch": TIS()}, "control_variate mismatch"),
        ({"max_log_ratio": 41.0}, "max_log_ratio"),
        ({"kl_in_clip": True}, "kl_in_clip"),
        ({"kl_in_clip": True, "divergence": "none", "clip": clip.Box()}, "kl_in_clip"),
        ({"kl_in_clip": True, "divergence": "k3", "clip": clip.Box()}, "kl_in_clip"),
        ({"kl_in_clip": True, "clip": clip.LogBox()}, "kl_in_clip"),
        ({"kl_in_clip": True, "clip": clip.Sigmoid()}, "kl_in_clip"),
        ({"kl_in_clip": True, "clip": clip.Box(), "kl_to_go": True}, "kl_in_clip"),
        ({"through_advantage": True, "clip": clip.DualClip()}, "through_advantage"),
        ({"through_advantage": True, "estimator": "differentiable"}, "through_advantage"),
        ({**PRINTED, "divergence": "fkl", "kl_in_clip": True}, "through_advantage"),
        ({**PRINTED, "kl_in_clip": False}, "through_advantage"),
        ({"token_clip": clip.Box(), "divergence": "none", "estimator": "differentiable"}, "token_clip level"),
        ({"token_clip": clip.Box(), "divergence": "none", "level": "sequence-mean"}, "token_clip estimator"),
        ({"token_clip": clip.Box(), "level": "sequence-mean", "estimator": "differentiable"}, "token_clip divergence"),
        ({"token_clip": clip.TrustRegion(), "level": "sequence-mean"}, "token_clip"),
        ({"token_clip": clip.Sigmoid(), "level": "sequence-mean"}, "token_clip"),
        ({"length_weighted": True}, "length_weighted level"),
        ({"length_weighted": True, "level": "sequence", "control_variate": True}, "control_variate"),
        ({"clip": clip.TrustRegion(), "level": "sequence"}, "TrustRegion level"),
        ({"entropy_target": -1.0}, "entropy_target"),
        ({"entropy_target": 0.2, "entropy_bonus": 0.5, "entropy_bonus_limit": 0.1}, "entropy_bonus_limit"),
        ({"gate": gates.KLCov(), "clip": clip.RPGClip()}, "KLCov kl_in_clip"),
        ({"gate": gates.HighEntropy(), "level": "sequence"}, "gate level"),
        ({"entropy_bonus": -0.1}, "entropy_bonus"),
        ({"entropy_step": 0.0}, "entropy_step"),
    ],
    ids=str,
)
def test_impossible_losses(options, names):
    with pytest.raises(ValueError) as error:
        PolicyLoss(**options)
    one_line(error, *names.split())
    with pytest.raises(ValueError):
        PolicyLoss().replace(**options)


@pytest.mark.parametrize(("name", "value"), [("clip", 0.2), ("clip", "box"), ("clip", clip.Box), ("mismatch", "tis")])
def test_rules_must_be_rules(name, value):
    with pytest.raises(TypeError) as error:
        PolicyLoss(**{name: value})
    one_line(error, name, "rpg.")


def test_small_numbers_are_allowed():
    assert PolicyLoss(max_log_ratio=0.5).max_log_ratio == 0.5
    assert PolicyLoss(reduction="constant", constant=0.5).constant == 0.5
    assert PolicyLoss(kl_ratio_cap=0.5).kl_ratio_cap == 0.5
    assert PolicyLoss(max_log_ratio=40, beta=0).beta == 0


def test_replace_suggests_the_nearest():
    with pytest.raises(ValueError) as error:
        PolicyLoss().replace(bta=1)
    one_line(error, "'bta'", "'beta'")


# ---- clips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [clip.Box, clip.DualClip, clip.RPGClip, clip.Truncate, clip.LogBox])
def test_impossible_bounds(rule):
    for name, value in (
        ("low", 1.0),
        ("low", 1.5),
        ("low", -0.1),
        ("low", math.nan),
        ("high", -0.1),
        ("high", math.nan),
    ):
        with pytest.raises(ValueError) as error:
            rule(**{name: value})
        one_line(error, name, f"{name}=None")
    rule(low=0.0, high=0.0) if rule in (clip.Box, clip.Truncate, clip.LogBox) else rule(low=0.0, high=0.0, c=1.5)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: clip.DualClip(c=1.28), "c 1.28"),
        (lambda: clip.DualClip(c=1.0), "c"),
        (lambda: clip.DualClip(high=None, c=1.0), "c"),
        (lambda: clip.DualClip(c=math.nan), "c"),
        (lambda: clip.RPGClip(high=2.0, c=3.0), "c 3"),
        (lambda: clip.KL3(0.05, c=1.35), "c 1.35"),
        (lambda: clip.KL3(0.0), "delta"),
        (lambda: clip.KL3(-1.0), "delta"),
        (lambda: clip.KL3(math.inf), "delta"),
        (lambda: clip.KL3(math.nan), "delta"),
        (lambda: clip.KL3(100.5), "delta"),
        (lambda: clip.KL3(800.0), "delta"),
        (lambda: clip.KL3(1e6, "k2"), "delta"),
        (lambda: clip.KL3(form="k4"), "form k3-inverse"),
        (lambda: clip.Adaptive(), "target_ess target_kl"),
        (lambda: clip.Adaptive(target_ess=0.9, target_kl=0.1), "target_ess target_kl"),
        (lambda: clip.Adaptive(target_ess=0.0), "target_ess"),
        (lambda: clip.Adaptive(target_ess=1.0), "target_ess"),
        (lambda: clip.Adaptive(target_kl=0.0), "target_kl"),
        (lambda: clip.Adaptive(target_kl=0.1, narrowest=0.0), "narrowest"),
        (lambda: clip.Adaptive(target_kl=0.1, narrowest=2.0), "narrowest widest"),
        (lambda: clip.Adaptive(target_kl=0.1, c=2.7), "c 2.7"),
        (lambda: clip.Sigmoid(tau_positive=0.0), "tau"),
        (lambda: clip.Sigmoid(tau_negative=0.0), "tau"),
    ],
)
def test_impossible_clips(make, names):
    with pytest.raises(ValueError) as error:
        make()
    one_line(error, *names.split())


def test_a_dual_bound_just_above_the_upper_one_is_allowed():
    assert clip.DualClip(high=0.28, c=1.29).c == 1.29
    assert clip.KL3(0.05, c=1.351).c == 1.351
    assert clip.Adaptive(target_kl=0.1, c=2.719).c == 2.719


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 100.0])
@pytest.mark.parametrize("form", clip.KL3_FORMS)
def test_every_delta_that_is_allowed_has_bounds(form, delta):
    low, high = clip.KL3(delta, form).bounds()
    assert 0 <= low < 1 < high < math.inf


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_vocabulary_kl():
    with pytest.raises(ValueError) as error:
        vocabulary_kl(torch.ones(1, 2, 3), torch.ones(1, 2, 3), "k3")
    one_line(error, "divergence", "k3")
    with pytest.raises(ValueError) as error:
        vocabulary_kl(torch.ones(1, 2, 3), torch.ones(1, 2, 4))
    one_line(error, "ref_logits", "[1, 2, 3]", "[1, 2, 4]")


def test_unknown_algorithm():
    with pytest.raises(ValueError) as error:
        rpg.algorithm("grppo")
    text = str(error.value)
    assert "\n" not in text
    assert "Did you mean 'grpo'?" in text


def test_a_mismatch_rule_by_its_name_in_settings():
    for name, rule in (("exact", "Mismatch"), ("mis", "MIS"), ("none", "TIS")):
        with pytest.raises(TypeError, match=rf"such as rpg\.mismatch\.{rule}\(\) or None; got '{name}'"):
            rpg.algorithm("dapo", mismatch=name)


def test_what_a_loss_needs_is_said_by_its_argument():
    refuse("this loss needs ref_logp=: log-probabilities anchor, first model", rpg.algorithm("grpo").loss)
    refuse("this loss needs keep=: rpg.clip.curvature_keep", rpg.algorithm("capo").loss)
