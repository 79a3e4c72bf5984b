"""Which policy is which, by enumeration: a sampler whose weights change in the middle of responses, in the real engine.

Every response of a small language is decoded, token by token as it is forced to be, from weights that change after one
or two tokens. The log-probabilities that the engine writes down are the behaviour policy's. With them the losses have
the gradient of the exact objective, in expectation over that sampler: for the clipped ratio's old policy being the
behaviour policy itself, and for old being recomputed with the exact weight old/behaviour on top.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import rpg
import tiny
from rollout.engines import engine
from rpg.loss.mismatch import Mismatch
from rpg.rollout import Sampling, eager, graph_batch, graphs, stream
from rpg.rollout.flight import Underway

VOCABULARY, LENGTH, END, PROMPT, BETA = 4, 3, 1, [2, 3], 0.3
RESPONSES = [
    y
    for size in range(1, LENGTH + 1)
    for y in itertools.product(range(VOCABULARY), repeat=size)
    if END not in y[:-1] and (y[-1] == END or size == LENGTH)
]
REWARDS = torch.linspace(-1, 2, len(RESPONSES), dtype=torch.float64).roll(7)


def model(seed):
    made = tiny.make("llama-tied", vocab_size=VOCABULARY, dtype=torch.float64, spread=0.4)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return made


def forced(logits, token, temperature, *_):
    """In place of the sampler: the number that decides a token is the token."""
    token = token.long()
    logp = (logits.double() / temperature).log_softmax(-1).gather(-1, token[:, None])[:, 0]
    return token, logp.float()


@pytest.fixture(params=["eager", "graphs"])
def way(request, monkeypatch):
    def table(seed, prompts, n, count):
        row = torch.zeros(1, count, dtype=torch.float64)
        row[0, : len(RESPONSES[seed])] = torch.tensor(RESPONSES[seed], dtype=torch.float64)
        return row

    engine.graphs = request.param == "graphs"
    run = engine(model(1), slots=64, end_ids=[END])  # it is tried out before anything is forced
    monkeypatch.setattr(eager, "sample", forced)
    for module in (graphs, graph_batch):
        monkeypatch.setattr(module, "fused_sample", forced)
    monkeypatch.setattr(stream, "uniform_table", table)
    monkeypatch.setattr(graph_batch, "LOOK_EVERY", 1)
    return run


def behaviour(run, cut, keep):
    """Log-probabilities of all responses, [N,T], of a sampler whose weights change after ``cut`` tokens."""
    run.model.load_state_dict(model(1).state_dict())
    found, asked = {}, []

    def until_cut(over, under_way):
        found.update((group.number, group.parts[0]) for group in over)
        asked.append(under_way)
        begun = engine.graphs and cut > 1  # the next step, before it is asked
        return None if len(asked) > cut - begun else []

    def to_the_end(over, under_way):
        found.update((group.number, group.parts[0]) for group in over)
        return []

    groups = [Underway.begin(i, PROMPT, i, 1) for i in range(len(RESPONSES))]
    groups = run.decode(groups, 1, Sampling(LENGTH), until_cut, version=0, keep_cache=keep)
    run.model.load_state_dict(model(2).state_dict())
    assert run.decode(groups, 1, Sampling(LENGTH), to_the_end, version=1, keep_cache=keep) == []
    logp_NT = torch.zeros(len(RESPONSES), LENGTH, dtype=torch.float64)
    for i, y in enumerate(RESPONSES):
        assert found[i].tokens == list(y)
        assert found[i].versions == [0] * min(cut, len(y)) + [1] * max(0, len(y) - cut)
        logp_NT[i, : len(y)] = torch.tensor(found[i].logp, dtype=torch.float64)
    return logp_NT


def log_policy(weights):
    """log π(a|h) of every state h that a response can be in."""
    states = sorted({y[:t] for y in RESPONSES for t in range(len(y))})
    return {h: weights(torch.tensor([[*PROMPT, *h]])).logits[0, -1].log_softmax(-1) for h in states}


def scores(by_state):
    rows = [[by_state[y[:t]][y[t]] for t in range(len(y))] for y in RESPONSES]
    return torch.stack(
        [torch.stack(row + [torch.zeros((), dtype=torch.float64)] * (LENGTH - len(row))) for row in rows]
    )


MASK_NT = torch.tensor([[t < len(y) for t in range(LENGTH)] for y in RESPONSES])


def gradient(value, weights):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(weights.parameters()), retain_graph=True)])


def exact_gradient(level, divergence, policies, log_b_NT):
    """Of −J: of the responses' own objective, or of the one whose states are frozen at the sampler."""
    current, by_state, logp_NT, p_ref, ref_NT = policies
    if level == "sequence":
        logp_N, ref_N = logp_NT.sum(-1), ref_NT.sum(-1)
        first, second = (ref_N, logp_N) if divergence in ("fkl", "ufkl") else (logp_N, ref_N)
        distance = (first.exp() * (first - second)).sum()
        return gradient(BETA * distance - (logp_N.exp() * REWARDS).sum(), current)
    b_N, total = log_b_NT.sum(-1).exp(), torch.zeros((), dtype=torch.float64)
    for h, logp_V in by_state.items():
        inside = torch.tensor([y[: len(h)] == h and len(y) > len(h) for y in RESPONSES])
        reach, value = b_N[inside].sum(), torch.zeros(VOCABULARY, dtype=torch.float64)
        for a in range(VOCABULARY):
            after = torch.tensor([y[: len(h) + 1] == (*h, a) for y in RESPONSES])
            value[a] = (b_N * REWARDS)[after].sum() / b_N[after].sum()
        ref_V = p_ref[h]
        first, second = (ref_V, logp_V) if divergence in ("fkl", "ufkl") else (logp_V, ref_V)
        total = total + reach * (BETA * (first.exp() * (first - second)).sum() - (logp_V.exp() * value).sum())
    return gradient(total, current)


def expected_gradient(level, divergence, estimator, policies, log_b_NT, old_NT, rollout_NT=None, rule=None):
    current, _, logp_NT, _, ref_NT = policies
    loss = rpg.PolicyLoss(divergence, BETA, estimator, level=level, reduction="none", mismatch=rule)
    out = loss(logp_NT, old_NT, REWARDS, MASK_NT, ref_NT, rollout_NT)
    b_N = log_b_NT.sum(-1).exp()
    return gradient((out.loss * (b_N if level == "sequence" else b_N[:, None])).sum(), current)


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("keep", [False, True], ids=["computed anew", "kept"])
@pytest.mark.parametrize("cut", [1, 2])
def test_the_gradient_is_exact_whatever_the_sampler_was(way, cut, keep, monkeypatch):
    if cut == 1:  # nothing is begun before the first word on whether to stop
        monkeypatch.setattr(stream.GraphStream, "_start_next_steps", lambda self: None)
    log_b_NT = behaviour(way, cut, keep)
    b_N = log_b_NT.sum(-1).exp()
    assert float(b_N.sum()) == pytest.approx(1, abs=1e-6)  # it is a distribution
    by_old, by_new, ref_NT, started = (scores(log_policy(model(seed))).detach() for seed in (1, 2, 4, 5))
    apart = (log_b_NT - torch.cat([by_old[:, :cut], by_new[:, cut:]], 1)).abs().max()
    assert apart < 5e-6 if not keep else apart > 1e-2  # float32; of kept keys it is neither's

    current, reference = model(3), {h: logp_V.detach() for h, logp_V in log_policy(model(4)).items()}
    by_state = log_policy(current)
    policies = current, by_state, scores(by_state), reference, ref_NT
    for level, divergence in itertools.product(("token", "sequence"), ("fkl", "ufkl", "rkl", "urkl")):
        exact = exact_gradient(level, divergence, policies, log_b_NT)
        for estimator in ("reinforce", "differentiable"):
            common = level, divergence, estimator, policies, log_b_NT
            assert error(expected_gradient(*common, log_b_NT), exact) < 1e-5, common[:3]
            # old recomputed: exact with the weight old/behaviour, biased without
            assert error(expected_gradient(*common, started, log_b_NT, Mismatch()), exact) < 1e-5, common[:3]
            assert error(expected_gradient(*common, started, log_b_NT), exact) > 0.02, common[:3]
            # one version for the whole response is another policy than the one that sampled
            for one in (by_old, by_new):
                assert error(expected_gradient(*common, one), exact) > 0.01, common[:3]
