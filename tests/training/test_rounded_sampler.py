"""A cache in 8 bits: three policies (the engine's μ, old, and the current one), and the gradient is right.

By exact enumeration in float64, with the loss that a run's own settings make.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rpg.audit.measure import expected_gradient
from rpg.audit.problem import EnumeratedProblem
from rpg.loss.mismatch import TIS, Mismatch, SequenceMask
from rpg.loss.policy_loss import PolicyLoss
from rpg.plan.plan import plan
from rpg.rollout import NativeEngine
from rpg.run.config import Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig
from rpg.run.view import View
from rpg.training import loop, setup
from rpg.training.old_logp import OldLogp
from rpg.training.setup import about_sampler, method_of
from running import metrics

BETA, SEEDS = 0.1, range(4)
FP8 = RolloutConfig(cache_dtype="fp8")


def loss_of(algorithm: str = "rpg-urkl", rollout: RolloutConfig = FP8, **options: Any) -> PolicyLoss:
    return method_of(Config(algorithm=algorithm, loss={"beta": BETA, **options}, rollout=rollout)).loss


# ---- by enumeration --------------------------------------------------------------------------------------------------


@functools.cache
def problem(seed: int) -> EnumeratedProblem:
    return EnumeratedProblem("three policies", True, seed, beta=BETA)


def near(p: EnumeratedProblem, drift: float = 0.4) -> torch.Tensor:
    """[N,T] of a policy that is neither the problem's sampler nor its current one: the trainer's, unrounded."""
    noise = torch.randn(p.theta.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return p.logp_NT(p.theta + drift * noise)


def coefficients(loss: PolicyLoss, p: EnumeratedProblem) -> torch.Tensor:
    """d loss / d log π of every token; μ is the engine, old the trainer's."""
    b, logp_NT = p.batch, p.batch.logp_NT.clone().requires_grad_()
    given = {"old_logp": near(p), "rollout_logp": b.old_logp_NT, "ref_logp": b.ref_logp_NT}
    out = loss(logp_NT, advantages=b.advantages_N, mask=b.mask_NT, **given)
    return torch.autograd.grad(out.loss.sum(), logp_NT)[0]


def error(c_NT: torch.Tensor, p: EnumeratedProblem, ascent_P: torch.Tensor) -> float:
    return float((expected_gradient(p, c_NT) + ascent_P).norm() / ascent_P.norm())


@pytest.mark.parametrize("algorithm", ["rpg-urkl", "rpg-reinforce-urkl", "rpg-fkl", "rpg-reinforce-rkl"])
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("token", {}),
        ("sequence", {"level": "sequence", "reduction": "seq-mean-token-sum"}),
        ("sequence", {"kl_to_go": True, "level": "sequence", "reduction": "seq-mean-token-sum"}),
    ],
    ids=["token", "sequence", "to go"],
)
def test_the_gradient_is_exact_by_default_and_wrong_without(
    algorithm: str, objective: str, options: dict[str, Any]
) -> None:
    if "kl_to_go" in options and "urkl" not in algorithm:
        pytest.skip("one divergence is enough")
    unclipped: dict[str, Any] = {"clip": None, "kl_in_clip": None, "through_advantage": False}
    without = loss_of(algorithm, mismatch="none", **options).replace(**unclipped, reduction="none")
    chosen = loss_of(algorithm, **options).replace(**unclipped, reduction="none")
    assert without.mismatch is None
    for seed in SEEDS:
        p = problem(seed)
        exact_P = p.objective_gradient(objective, chosen.divergence)
        assert error(coefficients(chosen, p), p, exact_P) < 1e-10
        assert error(coefficients(without, p), p, exact_P) > 0.01


@pytest.mark.parametrize(
    ("algorithm", "options", "rule"),
    [
        ("gspo", {"low": 0.1, "high": 0.1}, Mismatch()),
        ("gmpo", {}, Mismatch()),
        ("luspo", {}, Mismatch()),
        ("rpg-urkl", {"kl_to_go": True, "clip": None}, Mismatch("sequence")),
    ],
)
def test_what_looks_at_whole_responses_sees_those_of_old(
    algorithm: str, options: dict[str, Any], rule: Mismatch
) -> None:
    """Geometric means with their clips, and a KL reward-to-go: π/old decides what is cut, as the method has it."""
    with_rule = method_of(Config(algorithm=algorithm, loss=options, rollout=FP8)).loss.replace(reduction="none")
    assert with_rule.mismatch == rule
    for seed in SEEDS:
        p = problem(seed)
        plain = with_rule.replace(mismatch=None)
        chance_N = (near(p) * p.mask_NT).sum(-1).exp()
        assert float(chance_N.sum()) == pytest.approx(1)
        of_old_P = torch.einsum("n,nt,ntp->p", chance_N, coefficients(plain, p), p.score_NTP)
        assert error(coefficients(with_rule, p), p, -of_old_P) < 1e-10
        assert error(coefficients(plain, p), p, -of_old_P) > 0.01


# ---- what is decided -------------------------------------------------------------------------------------------------


def test_the_rule_is_there_with_8_bits_alone_and_a_choice_wins() -> None:
    assert loss_of(rollout=RolloutConfig()).mismatch is None
    assert loss_of().mismatch == Mismatch()
    assert loss_of(mismatch="none").mismatch is None
    assert loss_of(mismatch=None).mismatch is None
    assert loss_of(mismatch="tis").mismatch == TIS()
    assert loss_of(mismatch="sequence-mask").mismatch == SequenceMask()
    assert loss_of(kl_to_go=True).mismatch == Mismatch("sequence")  # at token level its own rule would be refused
    assert loss_of(control_variate=True).mismatch == Mismatch()


def test_every_preset_can_have_it() -> None:
    from rpg.loss.methods import algorithms

    for name in algorithms():
        config = Config(algorithm=name, rollout=replace(FP8, max_new_tokens=24))
        if name == "distill":
            config = replace(config, reference=replace(config.reference, model="builtin"))
        method = method_of(config)
        assert method.loss.needs_sampler
        assert OldLogp(config, method.loss, torch.float32).recompute


def said(**loss: Any) -> list[str]:
    config = Config(algorithm=loss.pop("algorithm", "dapo"), loss=loss, rollout=FP8)
    return list(about_sampler(method_of(config), config))


def test_it_is_said_in_one_line() -> None:
    begin = "rollout.cache_dtype fp8: samples are of the policy with a rounded cache, "
    end = " has the exact weight ρ = old/engine (--loss.mismatch none leaves it off)"
    assert said() == [f"{begin}so each token{end}"]
    assert said(algorithm="gspo") == [f"{begin}so each response{end}"]
    assert said(mismatch="none") == [f"{begin}and no weight corrects for it (loss.mismatch none)"]
    assert said(mismatch="sequence-mask") == [f"{begin}and no weight corrects for it (loss.mismatch sequence-mask)"]
    assert said(mismatch="tis") == []
    assert list(about_sampler(method_of(Config()), Config())) == []
    config = Config(rollout=FP8)
    assert plan(config, "h200").warnings[0] == f"{begin}so each token{end}"


# ---- a run -----------------------------------------------------------------------------------------------------------


class Listening(View):
    def __init__(self) -> None:
        self.told: list[str] = []

    def message(self, text: str, style: Any = "info") -> None:
        self.told.append(text)


@pytest.mark.parametrize("algorithm", ["rpg-reinforce-urkl", "gspo"])
def test_a_run_reports_mismatch_and_effective_sample_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(setup, "NativeEngine", functools.partial(NativeEngine, graphs=True))  # its steps, on a CPU
    config = Config(
        algorithm=algorithm,
        output=str(tmp_path),
        steps=2,
        rollout=replace(FP8, prompts=4, samples=4, max_new_tokens=24),
        eval=EvalConfig(every=0, problems=4, k=2),
        optim=OptimConfig(lr=1e-4, warmup=0),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )
    view = Listening()
    loop.train(config, shown=view)
    assert any("has the exact weight ρ = old/engine" in text for text in view.told)
    for row in metrics(tmp_path)[1:]:
        assert row["old_logp/recomputed"] == 1
        assert 1e-8 < row["mismatch/kl"] < 0.1
        assert 0.5 < row["mismatch/ess"] < 1
        assert row["mismatch/max_log_ratio"] > 1e-3
        assert row["mismatch/bounded"] == row["mismatch/dropped"] == 0
