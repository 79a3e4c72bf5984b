"""Rewards of a group -> advantages.

Every function takes rewards_N and group_N (the prompt each response answers; groups may differ in size) and returns one
advantage per response, [N]; ``reward_to_go`` and ``optimal_token`` return one per token, [N,T].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..console import brief, choose, flat_text, one_of

GROUP_KINDS = ("group-mean", "group-mean-std", "leave-one-out", "length-weighted", "success-rate", "log-partition")
TOKEN_KINDS = ("reward-to-go", "optimal-token")
KINDS = (*GROUP_KINDS, *TOKEN_KINDS, "batch-mean", "batch-whitening", "greedy-baseline", "constant", "none", "zero")
Range = tuple[float, float]
NEVER_NEGATIVE = (
    "no reward is below its baseline: nothing is learnt from a failure (loss.advantage.constant=…, or where the "
    "rewards lie: loss.advantage.reward_range=0,1)"
)


class BadRewards(ValueError):
    """Rewards that an advantage cannot be made of."""


class Groups:
    """Sums, means and deviations within groups of any sizes."""

    def __init__(self, group_N: Tensor):
        unique = group_N.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        self.index_N: Tensor = unique[1]
        self.size_K: Tensor = unique[2]

    def least(self, x_N: Tensor) -> Tensor:
        """Each element's group minimum, [N]."""
        least_K = x_N.new_zeros(len(self.size_K)).scatter_reduce_(0, self.index_N, x_N, "amin", include_self=False)
        return least_K[self.index_N]

    def total(self, x: Tensor) -> Tensor:
        """Each element's group sum; of [N,T] column by column."""
        return x.new_zeros(len(self.size_K), *x.shape[1:]).index_add_(0, self.index_N, x)[self.index_N]

    def members(self) -> tuple[Tensor, ...]:
        """The elements of each group, by their places."""
        return torch.split(self.index_N.argsort(stable=True), self.size_K.tolist())

    def mean(self, x_N: Tensor, weight_N: Tensor | None = None) -> Tensor:
        """Each element's group mean, [N], summed from the least element on: equal rewards give exactly 0."""
        weight_N = torch.ones_like(x_N) if weight_N is None else weight_N
        least_N = self.least(x_N)
        return least_N + self.total(weight_N * (x_N - least_N)) / self.total(weight_N)

    def std(self, x_N: Tensor) -> Tensor:
        """Each element's group standard deviation (n−1, as in TRL and verl; 0 for a group of one), [N]."""
        n_N = self.size_K[self.index_N]
        return (self.mean((x_N - self.mean(x_N)).square()) * n_N / (n_N - 1).clamp(min=1)).sqrt()


def group_mean(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """R − mean of the group. It shrinks the expected reward gradient by 1 − 1/G; leave-one-out does not."""
    return rewards_N - Groups(group_N).mean(rewards_N)


def group_mean_std(rewards_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """(R − mean)/(std + eps) of the group (GRPO). A prompt's effective β is then β·std."""
    groups = Groups(group_N)
    return (rewards_N - groups.mean(rewards_N)) / (groups.std(rewards_N) + eps)


def leave_one_out(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """R − mean of the group's others = G/(G−1)·(R − mean) (RLOO)."""
    groups = Groups(group_N)
    if int(groups.size_K.min()) < 2:
        raise ValueError("leave-one-out needs at least 2 responses to every prompt; a group has 1")
    size_N = groups.size_K[groups.index_N]
    return (rewards_N - groups.mean(rewards_N)) * size_N / (size_N - 1)


def length_weighted(rewards_N: Tensor, group_N: Tensor, length_N: Tensor) -> Tensor:
    """R − Σ|y|·R/Σ|y| of the group (OPO): the baseline of least variance where |∇log π(y)|² grows with the length."""
    return rewards_N - Groups(group_N).mean(rewards_N, length_N.to(rewards_N.dtype).clamp(min=1))


def success_rate(rewards_N: Tensor, group_N: Tensor, success_N: Tensor | None = None) -> Tensor:
    """(R − mean)/mean of the group, 0 where nothing succeeded (MaxRL). ``success_N``: in [0, 1], if R has more in it.

    With R of 0 and 1, success rate p and groups of G, the mean of A·∇log π is the gradient of log p's series
    −Σ_k (1−p)^k/k up to k = G − 1: a baseline of all G responses costs the last term.
    """
    groups, success_N = Groups(group_N), rewards_N if success_N is None else success_N
    if bool((success_N < -1e-6).any()):
        raise BadRewards(
            f"success-rate divides by the mean reward: none may be negative; the least is {float(success_N.min()):g} "
            "(advantage.reward_range says where rewards lie)"
        )
    rate_N = groups.mean(success_N)
    apart_N = rewards_N - groups.mean(rewards_N)
    return torch.where(rate_N > 1e-6, apart_N / rate_N.clamp(min=1e-6), 0.0)


def log_partition(rewards_N: Tensor, group_N: Tensor, tau: float) -> Tensor:
    """R − τ·log mean exp(R/τ) of the group's others: τ times the log-ratio that mirror descent aims at."""
    groups = Groups(group_N)
    if int(groups.size_K.min()) < 2:
        raise ValueError("log-partition needs at least 2 responses to every prompt; a group has 1")
    out_N = torch.empty_like(rewards_N)
    for members in groups.members():
        r_G = rewards_N[members]
        own_GG = torch.eye(len(r_G), dtype=torch.bool, device=r_G.device)
        others_GG = (r_G / tau).expand(len(r_G), -1).masked_fill(own_GG, -torch.inf)
        out_N[members] = r_G - tau * (others_GG.logsumexp(-1) - math.log(len(r_G) - 1))
    return out_N


def batch_whitening(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(x − mean)/(std + eps) over the whole batch, or over the masked elements."""
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    chosen = x[mask]
    if chosen.numel() < 2:
        raise ValueError(f"batch-whitening needs at least 2 elements; got {chosen.numel()}")
    return ((x - chosen.mean()) / (chosen.std() + eps)).masked_fill(~mask, 0)


def token_whitening(x_N: Tensor, length_N: Tensor, eps: float = 1e-8) -> Tensor:
    """The same with every token counted: a response's number enters mean and deviation as often as it has tokens."""
    length_N = length_N.to(x_N.dtype)
    tokens = length_N.sum()
    if not tokens >= 2:
        raise ValueError(f"whitening over tokens needs at least 2 of them; got {int(tokens)}")
    apart_N = x_N - (length_N * x_N).sum() / tokens
    return apart_N / (((length_N * apart_N.square()).sum() / (tokens - 1)).sqrt() + eps)


def signal_scale(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """GPG's α: all groups over those whose rewards differ (1 if none do)."""
    groups = Groups(group_N)
    with_signal = (groups.std(rewards_N) > 0).float()
    share = (with_signal / groups.size_K[groups.index_N]).sum() / len(groups.size_K)
    return torch.where(share > 0, 1 / share.clamp(min=1e-12), torch.ones_like(share))


def reward_to_go(rewards_N: Tensor, mask_NT: Tensor, kl_NT: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """[N,T]: what is still to come at each token of r_t = 1{t = last}·R − β·kl_t."""
    mask_NT = mask_NT.bool()
    last_NT = mask_NT & (mask_NT.flip(-1).cumsum(-1).flip(-1) == 1)
    token_NT = last_NT * rewards_N.unsqueeze(-1)
    if kl_NT is not None:
        token_NT = token_NT - beta * kl_NT.masked_fill(~mask_NT, 0)
    return token_NT.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask_NT, 0)


def optimal_token(to_go_NT: Tensor, mask_NT: Tensor, group_N: Tensor, score_sq_NT: Tensor) -> Tensor:
    """[N,T]: G_t − Σ W_t·G_t/Σ W_t over the group's responses that reach token t, W_t = Σ_{j≤t} |∇log π_j|².

    The baseline of least variance where the scores of different tokens are uncorrelated. Where one response alone
    reaches t there is nothing to compare it with: the baseline is 0.
    """
    mask_NT, groups = mask_NT.bool(), Groups(group_N)
    weight_NT = score_sq_NT.masked_fill(~mask_NT, 0).cumsum(-1).clamp(min=1e-12).masked_fill(~mask_NT, 0)
    least_N1 = groups.least(to_go_NT.masked_fill(~mask_NT, torch.inf).amin(-1)).unsqueeze(-1)
    baseline_NT = least_N1 + groups.total(weight_NT * (to_go_NT - least_N1)) / groups.total(weight_NT)
    several_NT = groups.total(mask_NT.to(to_go_NT.dtype)) > 1
    return torch.where(mask_NT, to_go_NT - torch.where(several_NT, baseline_NT, 0.0), 0.0)


def soft_overlong_penalty(lengths_N: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO: 0 up to max_length − cache, then falling linearly, −1 past max_length. Add it to the rewards."""
    if not 0 < cache < max_length:
        raise ValueError(f"cache must be between 0 and max_length={max_length}; got {cache}")
    return ((max_length - cache - lengths_N.float()) / cache).clamp(-1, 0)


@dataclass(frozen=True)
class Advantage:
    """One row of the advantage axis, ready to call.

    kind: group-mean, group-mean-std, leave-one-out, length-weighted (OPO), success-rate (MaxRL), log-partition (PMD);
        batch-mean, batch-whitening; greedy-baseline; constant, none; per token: reward-to-go, optimal-token;
        zero: no reward at all, the KL alone (distillation).
    baseline: subtract the group mean first (batch-whitening: REINFORCE++-baseline).
    whiten: whiten the result over the batch (reward-to-go: REINFORCE++).
    over: what whitening counts, ``responses`` or ``tokens``. An advantage per token is always whitened over tokens.
    scale_by_signal: multiply by GPG's α.
    beta: KL in the reward: R − β·Σ_t log(old/ref) before any baseline; per token, where the advantage is.
    constant: the baseline (kind constant).          tau: the temperature (kind log-partition).
    mapped_to: the range of rewards that the method was published for, where it matters: −1 … 1 for TOPR.
    reward_range: where the rewards lie; they are mapped from there to ``mapped_to``. None: they are taken as they come.
    """

    kind: str = "group-mean"
    baseline: bool = False
    whiten: bool = False
    scale_by_signal: bool = False
    beta: float = 0.0
    over: str = "responses"
    constant: float = 0.0
    tau: float | None = None
    mapped_to: Range | None = None
    reward_range: Range | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("over", self.over, ("responses", "tokens"))
        for name in ("mapped_to", "reward_range"):
            object.__setattr__(self, name, _range(name, getattr(self, name)))
        if not self.beta >= 0:
            raise ValueError(f"beta must be at least 0; got {self.beta}")
        if self.baseline and self.kind != "batch-whitening":
            raise ValueError("baseline goes with kind='batch-whitening'; the other kinds have their own")
        if self.over == "tokens" and not self.whitens:
            raise ValueError("over='tokens' says how to whiten: it goes with whiten=True or kind='batch-whitening'")
        if self.constant and self.kind != "constant":
            raise ValueError(f"constant is the baseline of kind='constant'; got kind={self.kind!r}")
        if (self.tau is not None) != (self.kind == "log-partition"):
            raise ValueError("tau goes with kind='log-partition', which needs it")
        if self.tau is not None and not self.tau > 0:
            raise ValueError(f"tau must be positive; got {self.tau}")
        if self.reward_range is not None and self.mapped_to is None:
            raise ValueError("reward_range is mapped to mapped_to: give that too, as in mapped_to=(-1, 1)")

    @property
    def whitens(self) -> bool:
        return self.whiten or self.kind == "batch-whitening"

    @property
    def per_token(self) -> bool:
        """Whether it is [N,T]; else a response has one."""
        return self.kind in TOKEN_KINDS

    @property
    def needs_mask(self) -> bool:
        return self.per_token or self.beta > 0 or self.over == "tokens" or self.kind == "length-weighted"

    @property
    def needs_score_sq(self) -> bool:
        """Whether it asks for |∇log π|² of each token."""
        return self.kind == "optimal-token"

    @property
    def only_here(self) -> str | None:
        """Why it runs in ``rpg train`` alone; None: TRL and verl have what it needs."""
        return "its baseline needs Σπ² of every token" if self.needs_score_sq else None

    def replace(self, **changes: object) -> Advantage:
        names = {f.name for f in fields(self)}
        for name in changes:
            if name not in names:
                raise ValueError(choose("advantage option", name, names))
        return replace(self, **changes)  # type: ignore[arg-type]

    def about_rewards(self, known: Range | None) -> Iterator[str]:
        """What a user should know of these rewards at the start. ``known``: where they lie, if anybody knows."""
        if self.mapped_to is not None and self.reward_range is not None:
            yield f"rewards of {_text(self.reward_range)} are mapped to {_text(self.mapped_to)}"
        elif self.mapped_to is not None and known is None:
            yield (
                f"it is for rewards of {_text(self.mapped_to)}, and takes yours as they come: if they lie elsewhere, "
                "say where, as in loss.advantage.reward_range=0,1"
            )
        elif self.kind in ("constant", "none") and known is not None and not known[0] < self.constant:
            yield (
                f"its baseline is {self.constant:g} and no reward of {_text(known)} is below it: nothing is learnt "
                "from a failure (loss.advantage.constant=…)"
            )

    def never_negative(self, rewards: Sequence[float]) -> bool:
        """Whether the baseline is fixed and these rewards, though they differ, are all above it."""
        if self.kind not in ("constant", "none") or not min(rewards) < max(rewards):
            return False
        return float(self._mapped(torch.tensor(min(rewards)))) >= self.constant

    def for_rewards(self, known: Range | None) -> Advantage:
        """With rewards mapped from where they lie, if that is known and it matters."""
        if self.mapped_to is None or self.reward_range is not None or known in (None, self.mapped_to):
            return self
        return replace(self, reward_range=known)

    def __call__(
        self,
        rewards: Tensor | Sequence[float],
        groups: Tensor | Sequence[int],
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
        score_sq: Tensor | None = None,
    ) -> Tensor:
        """rewards [N], groups [N] -> [N], or [N,T] where ``per_token``. Lists will do for both.

        mask [N,T] is needed where ``needs_mask``, old_logp and ref_logp [N,T] with a beta, score_sq [N,T] for
        optimal-token (``rpg.logit_score_sq``), greedy_rewards [N] for greedy-baseline.
        """
        rewards = _tensor("rewards", rewards, torch.float32)
        groups = _tensor("groups", groups, torch.long, rewards.device)
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards and groups must both be [N]; got {list(rewards.shape)} and {list(groups.shape)}")
        rewards = rewards.float() if rewards.element_size() < 4 or not rewards.is_floating_point() else rewards
        if not bool(torch.isfinite(rewards).all()):
            raise ValueError("rewards must be finite; score failed samples before computing advantages")
        if self.needs_mask and (mask is None or mask.dim() != 2 or len(mask) != len(rewards)):
            raise ValueError(f"mask must be [N,T] with N={len(rewards)} for {self}")
        kl_NT = self._kl(mask, old_logp, ref_logp) if self.beta else None
        plain_N = self._mapped(rewards)
        if self.per_token:
            assert mask is not None
            out = reward_to_go(plain_N, mask, kl_NT, self.beta)
            out = self._less_optimal(out, mask, groups, score_sq) if self.needs_score_sq else out
        else:
            regularised_N = plain_N if kl_NT is None else plain_N - self.beta * kl_NT.sum(-1)
            out = self._baselined(regularised_N, plain_N, groups, mask, greedy_rewards)
        if self.whitens:
            out = self._whitened(out, mask)
        return out * signal_scale(rewards, groups) if self.scale_by_signal else out

    def _mapped(self, rewards_N: Tensor) -> Tensor:
        if self.reward_range is None:
            return rewards_N
        assert self.mapped_to is not None
        (low, high), (least, most) = self.reward_range, self.mapped_to
        return least + (rewards_N - low) * (most - least) / (high - low)

    def _kl(self, mask: Tensor | None, old_logp: Tensor | None, ref_logp: Tensor | None) -> Tensor:
        """[N,T]: log(old/ref), 0 under the mask."""
        assert mask is not None
        for name, logp in {"old_logp": old_logp, "ref_logp": ref_logp}.items():
            if logp is None or logp.shape != mask.shape or not logp.is_floating_point():
                raise ValueError(f"{name} must be log-probabilities {list(mask.shape)} for a KL in the reward")
        assert old_logp is not None
        assert ref_logp is not None
        return (old_logp - ref_logp).masked_fill(~mask.bool(), 0)

    def _less_optimal(self, to_go_NT: Tensor, mask_NT: Tensor, groups: Tensor, score_sq: Tensor | None) -> Tensor:
        if score_sq is None or score_sq.shape != mask_NT.shape:
            raise ValueError(f"score_sq must be |∇log π|² {list(mask_NT.shape)} for {self.kind}")
        return optimal_token(to_go_NT, mask_NT, groups, score_sq.to(to_go_NT.dtype))

    def _whitened(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if out.dim() == 2 or self.over == "responses":
            return batch_whitening(out, mask if out.dim() == 2 else None)
        assert mask is not None
        return token_whitening(out, mask.bool().sum(-1))

    def _baselined(
        self, rewards: Tensor, plain: Tensor, groups: Tensor, mask: Tensor | None, greedy_rewards: Tensor | None
    ) -> Tensor:
        """``plain``: the rewards without a KL in them."""
        match self.kind:
            case "group-mean":
                return group_mean(rewards, groups)
            case "group-mean-std":
                return group_mean_std(rewards, groups)
            case "leave-one-out":
                return leave_one_out(rewards, groups)
            case "length-weighted":
                assert mask is not None
                return length_weighted(rewards, groups, mask.bool().sum(-1))
            case "success-rate":
                return success_rate(rewards, groups, plain)
            case "log-partition":
                assert self.tau is not None
                return log_partition(rewards, groups, self.tau)
            case "batch-mean":
                return rewards - rewards.mean()
            case "batch-whitening":
                return group_mean(rewards, groups) if self.baseline else rewards
            case "greedy-baseline":
                if greedy_rewards is None or greedy_rewards.shape != rewards.shape:
                    raise ValueError(
                        "greedy-baseline needs greedy_rewards [N], the greedy response's reward for each prompt"
                    )
                return rewards - self._mapped(greedy_rewards.to(rewards.dtype))
            case "zero":
                return rewards - plain  # what a KL in the reward leaves
        return rewards - self.constant


def _tensor(
    name: str, given: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Reward functions give lists, as in TRL and verl."""
    if isinstance(given, Tensor):
        return given
    try:
        return torch.as_tensor(given, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a tensor or a list of numbers; {flat_text(error)}") from None


def _range(name: str, given: object) -> Range | None:
    """Two numbers, also as a recipe or a flag has them: [0, 1] or "0,1"."""
    if given is None:
        return None
    try:
        low, high = map(float, given.strip("[]() ").split(",") if isinstance(given, str) else given)  # type: ignore
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be two numbers, as in 0,1; got {given!r}") from None
    if not low < high:
        raise ValueError(f"{name} must go from a smaller number to a larger one; got {low:g}, {high:g}")
    return low, high


def _text(reward_range: Sequence[float]) -> str:
    return " … ".join(f"{x:g}" for x in reward_range)
