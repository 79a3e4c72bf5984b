"""What a baseline does to the expected gradient: every group of responses enumerated, in float64."""

import itertools
import math
import statistics

import pytest
import torch

import rpg
from rpg import Advantage
from rpg.loss.advantages import (
    NEVER_NEGATIVE,
    Groups,
    batch_whitening,
    length_weighted,
    log_partition,
    optimal_token,
    reward_to_go,
    success_rate,
    token_whitening,
)

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # of three responses to a prompt
R = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
SCORES = torch.eye(3, dtype=torch.float64) - P  # ∇log π(y) with respect to the logits
OLD = torch.tensor([[-0.4, -0.2], [-1.3, 0.0], [-0.9, -0.7]], dtype=torch.float64)  # of their tokens
REF = torch.tensor([[-0.6, -0.3], [-1.0, 0.0], [-1.1, -0.2]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()


def expected_gradient(advantage, size, rewards=R):
    """E[1/G Σ A_i·∇log π(y_i)] over all groups of G responses."""
    total = torch.zeros(3, dtype=torch.float64)
    for drawn in itertools.product(range(3), repeat=size):
        y = torch.tensor(drawn)
        given = {"mask": MASK[y], "old_logp": OLD[y], "ref_logp": REF[y]}
        total += P[y].prod() * (advantage(rewards[y], torch.zeros(size), **given)[:, None] * SCORES[y]).mean(0)
    return total


def exact_gradient(rewards=R):
    return (P * rewards) @ SCORES


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_which_baselines_leave_the_gradient_alone(size):
    for rewards in (R, torch.tensor([-0.3, 2.0, 0.7], dtype=torch.float64)):
        whole = exact_gradient(rewards)
        close(expected_gradient(Advantage("leave-one-out"), size, rewards), whole)
        for constant in (0.0, 0.4, -1.0):
            close(expected_gradient(Advantage("constant", constant=constant), size, rewards), whole)
        close(expected_gradient(Advantage("none"), size, rewards), whole)
        for kind in ("group-mean", "batch-mean"):  # their baseline has the response itself in it
            close(expected_gradient(Advantage(kind), size, rewards), (1 - 1 / size) * whole)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_climbs_the_series_of_log_p(size):
    """∇ −Σ_{k<G} (1−p)^k/k = Σ_{k<G} (1−p)^{k−1}·∇p; a baseline of all G responses costs the term k = G."""
    p = float(P @ R)
    series = sum((1 - p) ** (k - 1) for k in range(1, size))
    close(expected_gradient(rpg.algorithm("maxrl").advantage, size), series * exact_gradient())
    assert series < 1 / p  # ∇log p, its limit
    signed = rpg.algorithm("maxrl").resolve(rewards=(-1.0, 1.0)).advantage
    close(expected_gradient(signed, size, 2 * R - 1), series * exact_gradient())


@pytest.mark.parametrize("kind", ["leave-one-out", "group-mean", "batch-mean", "constant"])
def test_a_kl_in_the_reward_is_that_of_the_objective(kind):
    """At π = old the gradient is that of E[R] − β·KL(π‖ref), tokens under the mask left out."""
    beta, size = 0.3, 3
    log_u = ((OLD - REF) * MASK).sum(-1)
    share = 1 - 1 / size if kind in ("group-mean", "batch-mean") else 1.0
    close(expected_gradient(Advantage(kind, beta=beta), size), share * exact_gradient(R - beta * log_u))
    for whole in (Advantage("group-mean-std", beta=beta), Advantage("success-rate", beta=beta)):
        y = torch.tensor([0, 1, 1, 2])
        got = whole(R[y], torch.zeros(4), mask=MASK[y], old_logp=OLD[y], ref_logp=REF[y])
        regularised = (R - beta * log_u)[y]
        apart = regularised - regularised.mean()
        close(got, apart / (regularised.std() + 1e-6 if whole.kind == "group-mean-std" else R[y].mean()))


# ---- TOPR: signed rewards -------------------------------------------------------------------------------------------


def coefficients(rewards, advantage):
    """c of one token of each response under TOPR's loss, on-policy but for the last, whose W is e^−2."""
    logp = torch.full((len(rewards), 1), -1.0, dtype=torch.float64, requires_grad=True)
    old, mask = logp.detach().clone(), torch.ones(len(rewards), 1)
    old[-1] += 2
    a = advantage(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)))
    loss = rpg.algorithm("topr").loss(logp, old, a, mask).loss * len(rewards)
    return torch.autograd.grad(loss, logp)[0].squeeze(-1).tolist()


def test_topr_learns_from_failures_whatever_range_a_task_has():
    published = rpg.algorithm("topr")
    signed = coefficients([1, 1, -1, -1], published.advantage)
    assert signed == pytest.approx([-1, -1, 1, math.exp(-2)])
    assert coefficients([1, 1, 0, 0], published.advantage) == pytest.approx([-1, -1, 0, 0])  # as they come: crippled
    for low, high in ((0.0, 1.0), (0.0, 2.0), (5.0, 6.0)):
        method = published.resolve(rewards=(low, high))
        assert coefficients([high, high, low, low], method.advantage) == pytest.approx(signed)
    assert published.resolve(rewards=(-1.0, 1.0)).advantage == published.advantage
    assert published.resolve().advantage == published.advantage
    shifted = rpg.algorithm("topr", advantage={"constant": 0.5}).resolve(rewards=(0.0, 1.0)).advantage
    assert coefficients([1, 1, 0, 0], shifted) == pytest.approx([-0.5, -0.5, 1.5, 1.5 * math.exp(-2)])


def test_a_run_says_what_it_does_to_rewards():
    topr, maxrl, none = (rpg.algorithm(name) for name in ("topr", "maxrl", "rloo"))
    assert topr.resolve(rewards=(0.0, 1.0)).remarks((0.0, 1.0)) == ["topr: rewards of 0 … 1 are mapped to -1 … 1"]
    assert "loss.advantage.reward_range=0,1" in topr.resolve().remarks(None)[0]
    assert maxrl.resolve(rewards=(0.0, 1.0)).remarks((0.0, 1.0)) == []
    assert none.resolve().remarks(None) == []
    fixed = rpg.algorithm("rloo", advantage={"kind": "constant", "constant": 0.5}).resolve()
    assert fixed.remarks((0.0, 1.0)) == fixed.remarks(None) == []
    for low in (0.5, 0.75):
        assert "nothing is learnt from a failure" in fixed.remarks((low, 1.0))[0]
    assert "no critic" in rpg.algorithm("ppo").resolve().remarks(None)[0]
    assert "baseline" in NEVER_NEGATIVE


def test_rewards_that_were_seen_say_it_too():
    fixed = Advantage("constant", constant=0.5)
    assert fixed.never_negative([0.5, 1.0])
    assert not fixed.never_negative([0.4, 1.0])
    assert not fixed.never_negative([1.0, 1.0])  # nothing to tell apart
    assert not Advantage("group-mean").never_negative([0.5, 1.0])
    assert Advantage("none").never_negative([0.0, 1.0])
    mapped = Advantage("constant", mapped_to=(-1, 1), reward_range=(0, 1))
    assert not mapped.never_negative([0.0, 1.0])


# ---- by hand ---------------------------------------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, -0.25, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 1, 4, 1, 4, 1])
LENGTHS = [3, 1, 4, 2, 2, 4]
TOKENS = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


def members(group):
    return [i for i, g in enumerate(GROUPS.tolist()) if g == group]


def test_length_weighted():
    want = []
    for i, g in enumerate(GROUPS.tolist()):
        others = members(g)
        b = sum(LENGTHS[j] * float(REWARDS[j]) for j in others) / sum(LENGTHS[j] for j in others)
        want.append(float(REWARDS[i]) - b)
    got = Advantage("length-weighted")(REWARDS, GROUPS, mask=TOKENS)
    assert got.tolist() == pytest.approx(want, abs=1e-12)
    assert rpg.algorithm("opo").advantage(REWARDS, GROUPS, mask=TOKENS).tolist() == got.tolist()
    equal = length_weighted(torch.full((3,), 0.1), torch.zeros(3), torch.tensor([1, 2, 30]))
    assert equal.tolist() == [0.0] * 3
    nothing = length_weighted(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0, 0]))  # counts as one token
    assert nothing.tolist() == [0.5, -0.5]


def test_length_weighted_is_the_baseline_of_least_variance_where_scores_grow_with_the_length():
    """b minimises Σ |y|·(R − b)² over the group: its derivative there is 0."""
    i = members(4)
    a = length_weighted(REWARDS[i], torch.zeros(3), torch.tensor([LENGTHS[j] for j in i]))
    assert sum(LENGTHS[j] * float(x) for j, x in zip(i, a, strict=True)) == pytest.approx(0, abs=1e-12)


def test_log_partition_leaves_the_response_itself_out():
    for tau in (0.01, 0.7):
        got = Advantage("log-partition", tau=tau)(REWARDS, GROUPS).tolist()
        for i, g in enumerate(GROUPS.tolist()):
            others = [float(REWARDS[j]) for j in members(g) if j != i]
            top = max(others)
            mean = statistics.fmean(math.exp((r - top) / tau) for r in others)
            assert got[i] == pytest.approx(float(REWARDS[i]) - top - tau * math.log(mean), abs=1e-12)
    lone = log_partition(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.zeros(4), 0.01)
    assert float(lone[0]) == 1.0  # no clamp: the only one that is right is worth all of it
    two = log_partition(torch.tensor([1.0, 0.5]), torch.zeros(2), 0.01)
    assert two.tolist() == pytest.approx([0.5, -0.5])
    with pytest.raises(ValueError, match="at least 2"):
        log_partition(torch.ones(3), torch.tensor([0, 0, 1]), 0.1)
    assert rpg.algorithm("pmd-partition").advantage.tau == rpg.algorithm("pmd-partition").loss.beta == 0.01
    warmer = rpg.algorithm("pmd-partition", beta=0.2)
    assert (warmer.advantage.tau, warmer.loss.beta) == (0.2, 0.2)


def test_success_rate_at_its_edges():
    rewards, groups = torch.tensor([0.0, 0, 1, 1, 1, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    assert success_rate(rewards, groups).tolist() == [0, 0, 0, 0, 3, -1, -1, -1]
    assert success_rate(torch.ones(1), torch.zeros(1)).tolist() == [0.0]
    assert success_rate(torch.tensor([4e-6, 0.0]), torch.zeros(2)).tolist() == pytest.approx([1, -1], rel=1e-6)
    assert success_rate(torch.tensor([1e-6, 0.0]), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert success_rate(torch.tensor([2e-6, 0.0], dtype=torch.float64), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert success_rate(torch.tensor([1.0, -1e-7]), torch.zeros(2)).isfinite().all()  # rounding
    with pytest.raises(ValueError, match="none may be negative; the least is -1"):
        success_rate(torch.tensor([1.0, -1.0]), torch.zeros(2))
    with pytest.raises(ValueError, match="negative"):
        success_rate(torch.tensor([1.0, -2e-6]), torch.zeros(2))


def test_optimal_token_by_hand():
    """Position by position over the responses that are so long; where one alone is, no baseline."""
    g = torch.Generator().manual_seed(0)
    score_sq = torch.rand(6, 4, generator=g, dtype=torch.float64)
    old, ref = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
    for beta in (0.0, 0.4):
        given = {"mask": TOKENS, "old_logp": old, "ref_logp": ref, "score_sq": score_sq}
        got = Advantage("optimal-token", beta=beta)(REWARDS, GROUPS, **given)
        to_go = reward_to_go(REWARDS, TOKENS, old - ref, beta)
        for i, group in enumerate(GROUPS.tolist()):
            for t in range(4):
                alive = [j for j in members(group) if t < LENGTHS[j]]
                weight = {j: float(score_sq[j, : t + 1].sum()) for j in alive}
                b = sum(weight[j] * float(to_go[j, t]) for j in alive) / sum(weight.values()) if len(alive) > 1 else 0
                want = float(to_go[i, t]) - b if t < LENGTHS[i] else 0.0
                assert float(got[i, t]) == pytest.approx(want, abs=1e-12)
    garbage = score_sq.masked_fill(~TOKENS, math.nan)
    close(optimal_token(to_go, TOKENS.long(), GROUPS, garbage), got)
    gap = torch.tensor([[1, 0, 1], [1, 0, 1]]).bool()  # a tool's tokens, in the middle
    two = optimal_token(
        torch.tensor([[1.0, 0, 1], [0, 0, 0]]), gap, torch.zeros(2), torch.tensor([[1, 9, 1], [1, 9, 2]])
    )
    assert two[:, 2].tolist() == pytest.approx([1 - 2 / 5, -2 / 5])
    equal = Advantage("optimal-token")(
        torch.full((3,), 0.1), torch.zeros(3), mask=TOKENS[[0, 2, 5]], score_sq=score_sq[:3]
    )
    assert (equal[:, :3] == 0).all()
    certain = optimal_token(to_go, TOKENS, GROUPS, torch.zeros(6, 4))  # |∇log π|² = 0: a plain mean
    assert float(certain[0, 0]) == pytest.approx(float(to_go[0, 0]) - float(to_go[members(4), 0].mean()))
    for wrong in (None, score_sq[:, :3]):
        with pytest.raises(ValueError, match="score_sq"):
            Advantage("optimal-token")(REWARDS, GROUPS, mask=TOKENS, score_sq=wrong)


def test_whitening_over_tokens_counts_each_token():
    expanded = batch_whitening(REWARDS[:, None].expand(6, 4), TOKENS)
    got = token_whitening(REWARDS, torch.tensor(LENGTHS))
    close(got[:, None] * TOKENS, expanded)
    for rule in (Advantage("batch-whitening", over="tokens"), Advantage("none", whiten=True, over="tokens")):
        close(rule(REWARDS, GROUPS, mask=TOKENS), got)
    by_responses = batch_whitening(REWARDS)
    assert (got - by_responses).abs().max() > 0.05
    close(Advantage("none", whiten=True)(REWARDS, GROUPS, mask=TOKENS), by_responses)
    to_go = [Advantage("reward-to-go", whiten=True, over=over) for over in ("responses", "tokens")]  # always tokens
    close(to_go[0](REWARDS, GROUPS, mask=TOKENS), to_go[1](REWARDS, GROUPS, mask=TOKENS))
    published = rpg.algorithm("reinforce++-baseline").advantage
    centred = Advantage("group-mean")(REWARDS, GROUPS)
    close(published(REWARDS, GROUPS, mask=TOKENS), token_whitening(centred, torch.tensor(LENGTHS)))
    assert token_whitening(torch.tensor([1.0]), torch.tensor([2])).tolist() == [0.0]
    with pytest.raises(ValueError, match="at least 2"):
        token_whitening(torch.tensor([1.0, 2.0]), torch.tensor([1, 0]))


def test_batch_mean_and_mapped_rewards():
    close(Advantage("batch-mean")(REWARDS, GROUPS), REWARDS - REWARDS.mean())
    greedy = torch.linspace(0, 1, 6, dtype=torch.float64)
    mapped = Advantage("greedy-baseline", mapped_to=(2, 6), reward_range=(1, 3))
    close(mapped(REWARDS, GROUPS, greedy_rewards=greedy), 2 * (REWARDS - greedy))
    plain = Advantage("none", mapped_to=(2, 6), reward_range=(1, 3))
    close(plain(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)), torch.tensor([2.0, 4.0, 6.0]))
    text = Advantage("constant", mapped_to="-1,1", reward_range=[0, 2])
    assert (text.mapped_to, text.reward_range) == ((-1.0, 1.0), (0.0, 2.0))
    assert Advantage("constant", mapped_to="[-1, 1]").mapped_to == (-1.0, 1.0)


def test_members_of_groups_of_any_sizes():
    found = [m.tolist() for m in Groups(torch.tensor([7, 2, 7, 2, 2, 5])).members()]
    assert found == [[1, 3, 4], [5], [0, 2]]


def test_what_needs_what():
    def needs(**options):
        rule = Advantage(**options)
        return rule.needs_mask, rule.per_token, rule.needs_score_sq, rule.whitens

    assert needs() == (False, False, False, False)
    assert needs(beta=0.1)[0]
    assert needs(kind="length-weighted") == (True, False, False, False)
    assert needs(kind="batch-whitening", over="tokens") == (True, False, False, True)
    assert needs(kind="none", whiten=True) == (False, False, False, True)
    assert needs(kind="reward-to-go") == (True, True, False, False)
    assert needs(kind="optimal-token") == (True, True, True, False)
    for rule in (Advantage("length-weighted"), Advantage(beta=0.1), Advantage("batch-whitening", over="tokens")):
        with pytest.raises(ValueError, match="mask must be"):
            rule(REWARDS, GROUPS)


def test_without_a_reward_a_kl_in_it_is_all_there_is():
    old, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    known = {"mask": torch.ones(1, 2), "old_logp": old, "ref_logp": ref}
    assert rpg.Advantage("zero", beta=0.1)(torch.tensor([3.0]), torch.zeros(1), **known).tolist() == pytest.approx(
        [0.05]
    )
    assert rpg.Advantage("zero")(torch.tensor([3.0]), torch.zeros(1)).tolist() == [0.0]
