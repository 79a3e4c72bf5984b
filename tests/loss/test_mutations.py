"""Flipping a sign, dropping a weight or moving a limit anywhere in the formulas makes a test fail.

Every mutant of the modules that hold the mathematics must be killed by the tests named in mutations.ORACLES,
except those of EQUIVALENT, which change nothing that can be observed, each with its reason.
One mutant of four is tried, RPG_MUTANTS=all tries every one.
"""

import ast
import json
import os
import subprocess
import sys

import pytest

from loss import mutations

NO_GRADIENT = "no gradient is taken here: the caller is under no_grad, or only compares. It saves memory"
NO_MASS = "a boundary that random ratios never hit, and on which either side is right"
BOTH_CUT = "where the KL term is inside, both rules cut whole samples by the sign of ω/w"
ONE_AXIS = "one axis: the first is the last"
TWO_AXES = "two axes: the second is the last"
BEFORE_USE = "the first chunk sets it"
ENDS = "self._width, self._ends = ({}, [0])"
AT_A_TIME = "CHUNK.get(kept.ids_K.device.type, CHUNK['cpu']) // width"
LAST = "(inside_BV.sum(-1, keepdim=True) - 1)"
DRAWN = "logp_BV.gather(-1, token_B1)"
HIDDEN = "logp_NV.masked_fill(outside_NV"
TARGETS = "logp_NV.gather(-1, target_N.unsqueeze(-1))"
BONUS, GIVEN = "self.entropy_bonus", "entropy is not None"
SIZE = "vocabulary_kl: logits_BTV.element_size() < 4"
REMOVED = "(first_BTV - second_BTV).masked_fill(first_BTV == float('-inf')"

LEAST = "x_N.new_zeros(len(self.size_K)).scatter_reduce_({}, self.index_N, x_N, 'amin', include_self=False)"
TO_GO = "to_go_NT.masked_fill(~mask_NT, torch.inf)"
REWARD_SIZE = "Advantage.__call__: rewards.element_size()"

EVERY = 1 if os.environ.get("RPG_MUTANTS") == "all" else 4

EQUIVALENT = {
    "objective": {
        "Ratios.detach: self.w.detach() -> self.w": NO_GRADIENT,
        "Ratios.detach: self.log_u.detach() -> self.log_u": NO_GRADIENT,
        "Ratios.detach: self.logp.detach() -> self.logp": NO_GRADIENT,
        "DIVERGENCES: r.v + torch.zeros_like(r.w) -> r.v - torch.zeros_like(r.w)": "zeros, to get w's shape",
        "_Bound.backward: grads[0] -> grads[-1]": "one output: its first gradient is its last",
        f"{SIZE} -> logits_BTV.element_size() <= 4": "float() of a float32 is itself",
        f"{SIZE} -> logits_BTV.element_size() < 5": "float() of a float32 is itself",
        f"{SIZE} -> logits_BTV.element_size() < 3": "no type has three bytes",
        f"vocabulary_kl: {REMOVED}, 0) -> {REMOVED}, 1)": "multiplied by a probability of 0",
        f"vocabulary_kl: {REMOVED}, 0) -> {REMOVED}, -1)": "multiplied by a probability of 0",
    },
    "policy_loss": {
        "PolicyLoss.has_kl: self.beta > 0 -> self.beta >= 0": "β = 0 multiplies the term that is then computed",
        "PolicyLoss.has_kl: self.beta > 0 -> self.beta > -1": "β = 0 multiplies the term that is then computed",
        "PolicyLoss._terms: log_w.detach() -> log_w": NO_GRADIENT,
        "PolicyLoss.__call__: old_mass != 1.0 -> old_mass != 0.0": "a mass of 1 multiplies",
        "PolicyLoss._terms: x.logp.detach() -> x.logp": NO_GRADIENT,
        "PolicyLoss._omega_to_go: x.logp.detach() -> x.logp": NO_GRADIENT,
        "PolicyLoss._omega_to_go: x.logp.detach() -> x.logp (#2)": NO_GRADIENT,
        f"PolicyLoss.__call__: {BONUS} and {GIVEN} -> {BONUS} or {GIVEN}": "0 multiplies; without an entropy: refused",
        "PolicyLoss._choose: x.logp.detach() -> x.logp": NO_GRADIENT,
        "PolicyLoss._terms: state_kl.detach() -> state_kl": NO_GRADIENT,
        "_bound_tokens: log_w_BT.detach() -> log_w_BT": NO_GRADIENT,
    },
    "terms": {
        "Terms.signed_advantage: self.ratios.detach() -> self.ratios": NO_GRADIENT,
        "Terms.weight: self.ratios.w.detach() -> self.ratios.w": NO_GRADIENT,
        "Terms.omega_kl: self.ratios.detach() -> self.ratios": NO_GRADIENT,
        "Terms.omega_kl: self.log_w.detach() -> self.log_w": NO_GRADIENT,
        "Terms.cut: self.ratios.w.detach() -> self.ratios.w": NO_GRADIENT,
        "Terms.differentiable: regularised.detach() -> regularised": NO_GRADIENT,
    },
    "clip": {
        "Clip.outside: w <= low_p -> w < low_p": "0 in every rule that cuts, and ratios are positive",
        "_inside: low <= 0 -> low < 0": "0 < w always: the shortcut saves a comparison",
        "_inside: low <= 0 -> low <= -1": "0 < w always: the shortcut saves a comparison",
        "Adaptive.fit: range(24) -> range(25)": "bisection, to 1e-7 of the range or to half of that",
        "Adaptive.fit: range(24) -> range(23)": "bisection, to 1e-7 of the range or to twice that",
        "Adaptive._meets: w.sum().square() >= self.target_ess * w.numel() * w.square().sum() -> "
        "w.sum().square() > self.target_ess * w.numel() * w.square().sum()": NO_MASS,
        "TrustRegion.distance: seen.old_logp.detach() -> seen.old_logp": NO_GRADIENT,
        "TrustRegion.distance: seen.old_logp.detach() -> seen.old_logp (#2)": NO_GRADIENT,
        "TrustRegion.distance: w.detach() -> w": NO_GRADIENT,
        "curvature_keep: probs_NV.shape[-1] -> probs_NV.shape[1]": "two axes: the second is the last",
        "curvature_keep: probs_NV.gather(-1, index_NK) * counted_NK -> probs_NV.gather(-1, index_NK)": (
            "what is counted twice has v = 0, hence q = 0, in every term that p enters"
        ),
    },
    "control_variate": {
        "control_variate: x.ratios.w.detach() -> x.ratios.w": NO_GRADIENT,
        "control_variate: int(group.max()) + 1 -> int(group.max()) + 2": "a further group without members",
        "control_variate: others[1] > 0 -> others[1] >= 0": "of no others the sums are 0, and so is their quotient",
        "control_variate: others[1] > 0 -> others[1] > -1": "of no others the sums are 0, and so is their quotient",
        "_sums_of_others: x.shape[:-1] -> x.shape[:1]": TWO_AXES,
        "control_variate: others[1].clamp(min=1e-30) -> others[1].clamp(min=-1.0)": "torch.where drops the quotient",
    },
    "mismatch": {},
    "gates": {
        "ClipCov.choose: covariance > self.cov_low -> covariance >= self.cov_low": NO_MASS,
        "ClipCov.choose: covariance < self.cov_high -> covariance <= self.cov_high": NO_MASS,
        "ClipCov.choose: candidate.flatten().nonzero()[:, 0] -> candidate.flatten().nonzero()[:, -1]": (
            "one axis: the first is the last"
        ),
    },
    "loss/methods/shared": {
        "dual_clip: A < 0 -> A <= 0": NO_MASS,
        "rpg_clip: A_hat >= 0 -> A_hat > 0": NO_MASS,
        "rpg_clip: w < high -> w <= high": NO_MASS,
        "rpg_clip: w > low -> w >= low": NO_MASS,
        "rpg_clip: w < c -> w <= c": NO_MASS,
    },
    "loss/methods/rpg_paper": {
        "rpg_reinforce_fkl_plain: omega / w -> omega": "the sign of ω/w is that of ω",
        "rpg_reinforce_rkl_plain: omega / w -> omega": "the sign of ω/w is that of ω",
        "rpg_reinforce_ufkl_plain: omega / w -> omega": "the sign of ω/w is that of ω",
        "rpg_reinforce_urkl_plain: omega / w -> omega": "the sign of ω/w is that of ω",
        **dict.fromkeys((f"rpg_{kl}: clip.DualClip -> clip.RPGClip" for kl in ("rkl", "urkl")), BOTH_CUT),
        **dict.fromkeys(
            (f"rpg_reinforce_{kl}: clip.RPGClip -> clip.DualClip" for kl in ("fkl", "rkl", "ufkl")), BOTH_CUT
        ),
    },
    "loss/methods/policy_gradients": {
        "cpgd_plain: A >= 0 -> A > 0": NO_MASS,
        "atr_grpo_plain: r > 1 -> r >= 1": NO_MASS,
        "atr_grpo_plain: A >= 0 -> A > 0": NO_MASS,
        "atr_grpo_plain: k3(r) > 0.05 -> k3(r) >= 0.05": NO_MASS,
        "topr_plain: A > 0 -> A >= 0": NO_MASS,
        "sapo_plain: A > 0 -> A >= 0": NO_MASS,
    },
    "loss/methods/weights": {
        "dppo_tv_plain: A >= 0 -> A > 0": NO_MASS,
        "dppo_tv_plain: gain > 0.15 -> gain >= 0.15": NO_MASS,
        "dppo_tv_plain: gain < -0.15 -> gain <= -0.15": NO_MASS,
        "dppo_kl_plain: kl > 0.05 -> kl >= 0.05": NO_MASS,
        "dppo_kl_plain: A >= 0 -> A > 0": NO_MASS,
        "dppo_kl_plain: q > p -> q >= p": NO_MASS,
        "dppo_kl_plain: q < p -> q <= p": NO_MASS,
        "clip_cov_plain: ppo_clip(r, A, 0, 2) -> ppo_clip(r, A, -1, 2)": "a ratio is positive",
        "gmpo: clip.Box -> clip.LogBox": "of a token's clip the limits alone are used",
        "gmpo_plain: A >= 0 -> A > 0": NO_MASS,
        "vespo_plain: A >= 0 -> A > 0": NO_MASS,
        "vespo_plain: A >= 0 -> A > 0 (#2)": NO_MASS,
    },
    "loss/methods/baselines": {},
    "advantages": {
        f"Groups.least: {LEAST.format(0)} -> {LEAST.format(-1)}": "one axis: the first is the last",
        "success_rate: success_N < -1e-06 -> success_N <= -1e-06": NO_MASS,
        "success_rate: rate_N.clamp(min=1e-06) -> rate_N.clamp(min=-0.999999)": "torch.where drops the quotient",
        "signal_scale: share.clamp(min=1e-12) -> share.clamp(min=-0.999999999999)": "torch.where drops the quotient",
        "log_partition: others_GG.logsumexp(-1) -> others_GG.logsumexp(1)": "two axes: the second is the last",
        f"optimal_token: {TO_GO}.amin(-1) -> {TO_GO}.amin(1)": "two axes: the second is the last",
        f"{REWARD_SIZE} < 4 -> rewards.element_size() <= 4": "float() of a float32 is itself",
        f"{REWARD_SIZE} < 4 -> rewards.element_size() < 5": "float() of a float32 is itself",
        f"{REWARD_SIZE} < 4 -> rewards.element_size() < 3": "no type has three bytes",
    },
    "anchor": {
        "Renewal.due: self.average_kl > self.config.kl -> self.average_kl >= self.config.kl": NO_MASS,
    },
    "kernels/kept": {
        f"KeptColumns.__init__: {ENDS.format(0)} -> {ENDS.format(1)}": BEFORE_USE,
        f"KeptColumns.__init__: {ENDS.format(0)} -> {ENDS.format(-1)}": BEFORE_USE,
        "KeptColumns.__init__: [0] -> [1]": BEFORE_USE,
        "KeptColumns.__init__: [0] -> [-1]": BEFORE_USE,
        "KeptColumns.hide: len(logits_NC) < self.kept.size -> len(logits_NC) <= self.kept.size": "none is elsewhere",
        "Gathered.forward: hidden_NH.shape[1] -> hidden_NH.shape[0]": "how many at a time",
        "Gathered.backward: hidden_NH.shape[1] -> hidden_NH.shape[0] (#2)": "how many at a time",
        f"_parts: max(1, {AT_A_TIME}) -> max(2, {AT_A_TIME})": "how many at a time",
        "Gathered.backward: len(used_U) if needs_weight else 0 -> len(used_U) if needs_weight else 1": "not used then",
    },
    "kernels/sample_torch": {
        "truncate: default 1.0 -> 2.0": "asks nothing either",
        "truncate: default 0 -> -1": "asks nothing either",
        "truncate: default 0.0 -> -1.0": "asks nothing either",
        "truncate: logits_BV.shape[-1] -> logits_BV.shape[1]": TWO_AXES,
        "truncate: logits_BV.amax(-1, keepdim=True) -> logits_BV.amax(1, keepdim=True)": TWO_AXES,
        "truncate: logits_BV.sort(dim=-1, descending=True) -> logits_BV.sort(dim=1, descending=True)": TWO_AXES,
        f"truncate: {LAST}.clamp_(min=0) -> {LAST}.clamp_(min=-1)": "none inside only where logits are NaN",
        "sample_kept: temperature != 1 -> temperature != 0": "a division by 1",
        "sample_kept: uniform_B.double() * cumulative_BV[:, -1] -> uniform_B.double()": "1 but for rounding",
        "sample_kept: logp_BV.shape[-1] -> logp_BV.shape[1]": TWO_AXES,
        "sample_kept: logp_BV.shape[-1] - 1 -> logp_BV.shape[-1] + 1": "past the end only where logits are NaN",
        "sample_kept: logp_BV.shape[-1] - 1 -> logp_BV.shape[-1] - 0": "past the end only where logits are NaN",
        "sample_kept: token_B1.squeeze(-1) -> token_B1.squeeze(1)": TWO_AXES,
        f"sample_kept: {DRAWN}.squeeze(-1) -> {DRAWN}.squeeze(1)": TWO_AXES,
    },
    "kernels/logp": {
        f"softmax_logp: {HIDDEN}, 0.0) -> {HIDDEN}, 1.0)": "multiplied by a probability of 0",
        f"softmax_logp: {HIDDEN}, 0.0) -> {HIDDEN}, -1.0)": "multiplied by a probability of 0",
        f"softmax_logp: {TARGETS}.squeeze(-1) -> {TARGETS}.squeeze(1)": TWO_AXES,
    },
    "rollout/kept": {"KeptStore.put: size_A.cumsum(0) -> size_A.cumsum(-1)": ONE_AXIS},
    "training/batch": {},
}


@pytest.fixture(scope="module")
def mutating(tmp_path_factory):
    """Runs the mutants of a module. Children are forked by a process of its own, which does the imports once: one that
    has called backward cannot fork."""
    log = tmp_path_factory.mktemp("mutants") / "log"
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, mutations.__file__]
    with (
        log.open("w") as err,
        subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=err) as process,
    ):

        def run(*job):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()
            return json.loads(line)

        yield run


@pytest.mark.parametrize("module", EQUIVALENT)
def test_every_mutant_is_killed(module, mutating):
    jobs = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1
    outcomes = dict(mutating(module, jobs, EVERY, list(EQUIVALENT[module])))
    fails = outcomes.pop(None, None)
    assert fails is None, f"a test fails without any mutation: {fails}"
    names = [mutant.name for mutant in mutations.of_module(module)]
    assert set(EQUIVALENT[module]) <= set(names), "a mutant listed as equivalent no longer exists"
    tried = [name for name in names if name not in EQUIVALENT[module]][::EVERY]
    assert sorted(outcomes) == sorted(tried)
    survivors = [name for name, killed_by in outcomes.items() if killed_by is None]
    assert not survivors, "\n".join(["no test fails under", *survivors])


def test_the_mutants_of_a_small_module():
    """The mutator itself: what it changes, and that a change is one change."""
    tree = ast.parse(
        "LIMIT: float = 2.0\n"
        "def f(x: int | None = 3) -> int:\n"
        "    return -x.sum(-1) * (x >= 1) & ~x.detach() / 2\n"
        "def _check_level(x):\n"
        "    return -x\n"
    )
    before = ast.unparse(tree)
    names = [mutant.name for mutant in mutations.mutants(tree)]
    assert ast.unparse(tree) == before
    assert names == [
        "LIMIT: LIMIT: float = 2.0 -> LIMIT: float = 3.0",
        "LIMIT: LIMIT: float = 2.0 -> LIMIT: float = 1.0",
        "f: default 3 -> 4",
        "f: default 3 -> 2",
        "f: -x.sum(-1) * (x >= 1) & ~x.detach() / 2 -> -x.sum(-1) * (x >= 1) | ~x.detach() / 2",
        "f: -x.sum(-1) * (x >= 1) -> -x.sum(-1)",
        "f: -x.sum(-1) * (x >= 1) -> x >= 1",
        "f: -x.sum(-1) -> x.sum(-1)",
        "f: x.sum(-1) -> x.sum(-2)",
        "f: x >= 1 -> x < 1",
        "f: x >= 1 -> x > 1",
        "f: x >= 1 -> x >= 2",
        "f: x >= 1 -> x >= 0",
        "f: ~x.detach() / 2 -> ~x.detach()",
        "f: ~x.detach() -> x.detach()",
        "f: x.detach() -> x",
        "f: ~x.detach() / 2 -> ~x.detach() / 3",
        "f: ~x.detach() / 2 -> ~x.detach() / 1",
    ]
    mutations.mutants(tree)[7].apply()
    assert ast.unparse(tree) == before.replace("-x.sum(-1)", "x.sum(-1)", 1)
