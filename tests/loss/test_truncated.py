"""Truncated sampling by exact enumeration, in float64: over the kept sets the expected gradient is that of the
truncated policy's objective; without them it is another one's."""

import itertools

import pytest
import torch

from rpg import PolicyLoss
from rpg.kernels import linear_logp
from rpg.kernels.kept import Kept
from rpg.kernels.sample_torch import truncate

V, LENGTH, BETA, DRIFT = 5, 2, 0.1, 0.3
HOW = {"top-p .9": {"top_p": 0.9}, "top-k 3": {"top_k": 3}, "min-p .2": {"min_p": 0.2}}
HOW["all three"] = {"top_p": 0.9, "top_k": 4, "min_p": 0.05}


class Problem:
    """Every response to one prompt: two tokens of five. A state is what was written so far; its logits are a row."""

    def __init__(self, how, seed):
        g = torch.Generator().manual_seed(seed)
        noise = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
        self.states = [()] + [(v,) for v in range(V)]
        self.old = 1.5 * noise(len(self.states), V)
        self.ref = self.old + DRIFT * noise(len(self.states), V)
        self.theta = self.old + DRIFT * noise(len(self.states), V)
        kept_SV = truncate(self.old, **how).isfinite()
        self.kept_SV = kept_SV
        self.sequences = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
        self.state_NT = torch.stack([torch.zeros(len(self.sequences), dtype=torch.long), 1 + self.sequences[:, 0]], 1)
        self.mask = torch.ones_like(self.sequences, dtype=torch.bool)
        possible_NT = kept_SV[self.state_NT, self.sequences]
        self.sampled = possible_NT.all(-1)
        self.reward = noise(len(self.sequences))

    def over_the_sets(self, table_SV):
        """log-probabilities [N,T] of the responses that can be sampled, by a softmax over each state's set."""
        logp_SV = table_SV.masked_fill(~self.kept_SV, -torch.inf).log_softmax(-1)
        return logp_SV[self.state_NT, self.sequences][self.sampled]

    def scored(self, table_SV, kept):
        """The same as the trainer computes it: states are hidden vectors, the table is the head's weight."""
        state_M, target_M = self.state_NT[self.sampled].flatten(), self.sequences[self.sampled].flatten()
        sets = Kept(self.kept_SV[state_M].nonzero()[:, 1].int(), self.kept_SV[state_M].sum(-1)) if kept else None
        hidden_MS = torch.eye(len(self.states), dtype=torch.float64)[state_M]
        return linear_logp(hidden_MS, table_SV.T, target_M, 1.0, sets)[0].view(-1, LENGTH)

    def exact(self):
        """∇(E[R] − β·KL) of the truncated policy, whose sets stay those of the sampler."""
        theta = self.theta.clone().requires_grad_()
        logp_N, ref_N = self.over_the_sets(theta).sum(-1), self.over_the_sets(self.ref).sum(-1)
        objective = (logp_N.exp() * (self.reward[self.sampled] - BETA * (logp_N - ref_N))).sum()
        return torch.autograd.grad(objective, theta)[0]

    def expected(self, estimator, kept):
        """Of the loss, over the responses that the truncated sampler draws. The sampler's are always truncated."""
        theta = self.theta.clone().requires_grad_()
        old_NT = self.over_the_sets(self.old)
        loss = PolicyLoss("urkl", BETA, estimator, level="sequence", reduction="none")
        mask, reward = self.mask[self.sampled], self.reward[self.sampled]
        out = loss(self.scored(theta, kept), old_NT, reward, mask, ref_logp=self.scored(self.ref, kept))
        return torch.autograd.grad((old_NT.sum(-1).exp() * out.loss).sum(), theta)[0]


def error(problem, estimator, kept):
    want = problem.exact()
    return float((problem.expected(estimator, kept) + want).norm() / want.norm())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_over_the_kept_sets_the_gradient_is_exact_and_without_them_it_is_not(how, estimator):
    problems = [Problem(HOW[how], seed) for seed in range(4)]
    assert all(0 < int(p.sampled.sum()) < len(p.sequences) for p in problems)
    assert max(error(p, estimator, kept=True) for p in problems) < 1e-12
    assert sum(error(p, estimator, kept=False) for p in problems) / len(problems) > 0.02


def test_the_sampler_over_its_sets_has_ratios_of_one():
    problem = Problem(HOW["all three"], 0)
    torch.testing.assert_close(problem.scored(problem.old, True), problem.over_the_sets(problem.old))
    assert (problem.scored(problem.old, False) < problem.over_the_sets(problem.old) - 1e-3).any()
