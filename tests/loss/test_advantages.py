"""Advantages against naive loops, with groups of uneven sizes in any order."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg import Advantage, algorithm
from rpg.loss.advantages import (
    batch_whitening,
    group_mean,
    group_mean_std,
    leave_one_out,
    reward_to_go,
    signal_scale,
    soft_overlong_penalty,
)

many = settings(max_examples=50, deadline=None)
reward = st.sampled_from([0.0, 1.0, 0.1, -1.0, 0.5, 3.25])
rewards_and_groups = st.lists(st.tuples(reward, st.integers(-2, 3)), min_size=1, max_size=20)


def tensors(drawn):
    rewards, groups = zip(*drawn, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)


def by_group(drawn):
    return {g: [r for r, h in drawn if h == g] for _, g in drawn}


@given(drawn=rewards_and_groups)
@many
def test_group_mean(drawn):
    expected = [r - statistics.fmean(by_group(drawn)[g]) for r, g in drawn]
    assert group_mean(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-12)
    assert Advantage("group-mean")(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-12)


@given(drawn=rewards_and_groups)
@many
def test_group_mean_std(drawn):
    expected = []
    for r, g in drawn:
        group = by_group(drawn)[g]
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        expected.append((r - statistics.fmean(group)) / (std + 1e-6))
    assert group_mean_std(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-9)
    assert Advantage("group-mean-std")(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-9)


@given(drawn=rewards_and_groups)
@many
def test_leave_one_out(drawn):
    groups = by_group(drawn)
    if min(len(x) for x in groups.values()) < 2:
        with pytest.raises(ValueError, match="at least 2 responses"):
            leave_one_out(*tensors(drawn))
        return
    expected = []
    for i, (r, g) in enumerate(drawn):
        expected.append(r - statistics.fmean(s for j, (s, h) in enumerate(drawn) if h == g and j != i))
    assert leave_one_out(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-12)
    assert Advantage("leave-one-out")(*tensors(drawn)).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_group_of_one():
    one = torch.tensor([1.0]), torch.tensor([0])
    for kind in ("group-mean", "group-mean-std"):
        assert Advantage(kind)(*one).tolist() == [0.0]
    assert Advantage("none")(*one).tolist() == [1.0]
    assert float(signal_scale(*one)) == 1.0
    for kind in ("leave-one-out", "batch-whitening"):
        with pytest.raises(ValueError, match=f"{kind} needs at least 2") as error:
            Advantage(kind)(*one)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e-3, 1234.56])
@pytest.mark.parametrize("size", [3, 7, 10, 16])
def test_equal_rewards_carry_no_signal_whatever_their_rounding(value, size):
    """In float32 ten times 0.1 over ten is not 0.1: the mean of equal rewards must still be that reward."""
    rewards = torch.tensor([value] * size + [0.0, 1.0])
    groups = torch.tensor([0] * size + [1, 1])
    for kind in ("group-mean", "group-mean-std", "leave-one-out"):
        assert Advantage(kind)(rewards, groups)[:size].tolist() == [0.0] * size
    assert float(signal_scale(rewards, groups)) == 2.0


@given(drawn=rewards_and_groups)
@many
def test_gpg_alpha(drawn):
    groups = by_group(drawn)
    signal = sum(len(set(x)) > 1 for x in groups.values())
    alpha = len(groups) / signal if signal else 1.0
    assert float(signal_scale(*tensors(drawn))) == pytest.approx(alpha, rel=1e-6)
    expected = [alpha * (r - statistics.fmean(groups[g])) for r, g in drawn]
    got = algorithm("gpg").advantage(*tensors(drawn))
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@given(drawn=rewards_and_groups)
@many
def test_batch_whitening(drawn):
    if len(drawn) < 2:
        return
    rewards, groups = tensors(drawn)
    for baseline in (False, True):
        x = group_mean(rewards, groups).tolist() if baseline else rewards.tolist()
        mean, std = statistics.fmean(x), statistics.stdev(x)
        got = Advantage("batch-whitening", baseline=baseline)(rewards, groups)
        assert got.tolist() == pytest.approx([(y - mean) / (std + 1e-8) for y in x], abs=1e-6)


def test_whitening_reads_and_writes_only_under_the_mask():
    x = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    got = batch_whitening(x, mask)
    chosen = [1.0, 2.0, 4.0, 9.0]
    mean, std = statistics.fmean(chosen), statistics.stdev(chosen)
    assert got[mask.bool()].tolist() == pytest.approx([(y - mean) / (std + 1e-8) for y in chosen])
    assert got[~mask.bool()].tolist() == [0.0, 0.0]
    assert batch_whitening(torch.ones(5)).tolist() == [0.0] * 5


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4)


@given(rows=masks, beta=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 10**6))
@many
def test_reward_to_go(rows, beta, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows)
    rewards = torch.randn(len(rows), generator=g, dtype=torch.float64)
    old, ref = torch.randn(2, *mask.shape, generator=g, dtype=torch.float64)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(rows)):
        tokens = [t for t in range(5) if rows[i][t]]
        for t in tokens:
            expected[i, t] = rewards[i] - beta * sum(float(old[i, s] - ref[i, s]) for s in tokens if s >= t)
    old, ref = old.masked_fill(~mask, math.nan), ref.masked_fill(~mask, -math.inf)
    got = Advantage("reward-to-go", beta=beta)(rewards, torch.arange(len(rows)), mask=mask, old_logp=old, ref_logp=ref)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(reward_to_go(rewards, mask.long(), old - ref, beta), expected)
    if beta == 0:
        torch.testing.assert_close(reward_to_go(rewards, mask), expected)
        torch.testing.assert_close(reward_to_go(rewards, mask, old - ref), expected)
        alone = Advantage("reward-to-go")(rewards, torch.arange(len(rows)), mask=mask, old_logp=old)
        torch.testing.assert_close(alone, expected)
    if mask.sum() >= 2:
        white = Advantage("reward-to-go", beta=beta, whiten=True)
        got = white(rewards, torch.arange(len(rows)), mask=mask, old_logp=old, ref_logp=ref)
        torch.testing.assert_close(got, batch_whitening(expected, mask))


def test_greedy_baseline():
    rewards, greedy = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 1.0])
    assert Advantage("greedy-baseline")(rewards, torch.zeros(2), greedy_rewards=greedy).tolist() == [0.5, -1.0]


def test_whitened_and_scaled_combine_in_this_order():
    rewards, groups = torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    plain = Advantage("group-mean")(rewards, groups)
    got = Advantage("group-mean", whiten=True, scale_by_signal=True)(rewards, groups)
    torch.testing.assert_close(got, 2 * batch_whitening(plain))


def test_soft_overlong_penalty_corners():
    lengths = torch.tensor([0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 10**6])
    got = soft_overlong_penalty(lengths, max_length=20480, cache=4096).tolist()
    assert got == pytest.approx([0, 0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1])
    assert soft_overlong_penalty(torch.tensor([8, 9, 10, 11]), max_length=10, cache=1).tolist() == [0, 0, -1, -1]
    for cache in (0, -1, 20480, 20481):
        with pytest.raises(ValueError, match="cache"):
            soft_overlong_penalty(lengths, 20480, cache)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.float32])
def test_types_are_raised_to_float32(dtype):
    got = Advantage("group-mean")(torch.tensor([1, 0, 1, 1]).to(dtype), torch.tensor([0, 0, 1, 1]))
    assert got.dtype == torch.float32
    assert got.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert Advantage("group-mean")(torch.ones(2, dtype=torch.float64), torch.zeros(2)).dtype == torch.float64


def to_go(**given):
    return Advantage("reward-to-go", beta=1)(torch.ones(1), torch.zeros(1), mask=torch.ones(1, 2), **given)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Advantage("group_mean"), "group-mean"),
        (lambda: Advantage("reward-to-go", beta=-1), "beta"),
        (lambda: Advantage("group-mean", beta=-0.1), "beta"),
        (lambda: Advantage("group-mean", beta=0.1)(torch.ones(2), torch.zeros(2)), "mask"),
        (lambda: Advantage("group-mean", constant=0.1), "constant"),
        (lambda: Advantage("log-partition"), "tau"),
        (lambda: Advantage("log-partition", tau=0.0), "tau"),
        (lambda: Advantage("group-mean", tau=0.1), "tau"),
        (lambda: Advantage("group-mean", over="tokens"), "over"),
        (lambda: Advantage("batch-whitening", over="token"), "tokens"),
        (lambda: Advantage("constant", reward_range=(0, 1)), "mapped_to"),
        (lambda: Advantage("constant", mapped_to=(1, -1)), "mapped_to"),
        (lambda: Advantage("constant", mapped_to=(1, 1)), "mapped_to"),
        (lambda: Advantage("constant", mapped_to="x"), "mapped_to"),
        (lambda: Advantage("constant", mapped_to=(1, 2, 3)), "mapped_to"),
        (lambda: Advantage().replace(witen=True), "whiten"),
        (lambda: Advantage()(torch.ones(2, 1), torch.ones(2)), "rewards and groups"),
        (lambda: Advantage()(torch.ones(2), torch.ones(3)), "rewards and groups"),
        (lambda: Advantage()(torch.tensor([1.0, math.nan]), torch.zeros(2)), "rewards must be finite"),
        (lambda: Advantage("greedy-baseline")(torch.ones(2), torch.zeros(2)), "greedy_rewards"),
        (lambda: Advantage("greedy-baseline")(torch.ones(2), torch.zeros(2), greedy_rewards=torch.ones(1)), "greedy"),
        (lambda: Advantage("reward-to-go")(torch.ones(2), torch.zeros(2)), "mask"),
        (lambda: to_go(), "old_logp"),
        (lambda: Advantage("reward-to-go")(torch.ones(4), torch.zeros(4), mask=torch.ones(4)), "mask"),
        (lambda: Advantage("reward-to-go")(torch.ones(4), torch.zeros(4), mask=torch.ones(3, 2)), "mask"),
        (lambda: to_go(old_logp=torch.ones(1, 2), ref_logp=torch.ones(1, 1)), "ref_logp"),
        (lambda: to_go(old_logp=torch.ones(1, 2), ref_logp=torch.ones(1, 2).long()), "ref_logp"),
        (lambda: Advantage("leave-one-out", baseline=True), "baseline"),
        (lambda: to_go(old_logp=torch.ones(1, 2)), "ref_logp"),
        (lambda: to_go(ref_logp=torch.ones(1, 2)), "old_logp"),
    ],
)
def test_errors(make, name):
    with pytest.raises(ValueError, match=name) as error:
        make()
    assert "\n" not in str(error.value)


def test_replace():
    changed = Advantage("group-mean").replace(kind="reward-to-go", beta=0.5, whiten=True)
    assert changed == Advantage("reward-to-go", whiten=True, beta=0.5)


def test_lists_will_do_as_reward_functions_give_them():
    advantage = algorithm("grpo").advantage
    wanted = advantage(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert wanted.dtype == torch.float32
    for rewards, groups in (
        ([1, 0, 1, 1], [0, 0, 1, 1]),
        (torch.tensor([1.0, 0.0, 1.0, 1.0]), (0, 0, 1, 1)),
        ([True, False, True, True], torch.tensor([0, 0, 1, 1])),
    ):
        assert advantage(rewards, groups).equal(wanted)
    with pytest.raises(ValueError, match="rewards must be a tensor or a list of numbers; must be real number, not Non"):
        advantage([1, None], [0, 0])
