"""Which methods are compared on a batch, each as it would run on it; and which are left out, with the reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..console import choose
from ..loss.clip import KL3, Box, Clip, DualClip, LogBox, Truncate, TrustRegion
from ..loss.methods import Algorithm, algorithm, algorithms
from ..loss.mismatch import Mismatch
from ..loss.objective import DIVERGENCES
from ..loss.policy_loss import PolicyLoss
from ..recorded.layout import Recorded
from ..recorded.losses import loss_of_data

USUAL = (
    *("rpg-reinforce-urkl", "rpg-reinforce-ufkl", "rpg-urkl", "reinforce", "grpo", "grpo-corrected", "dapo"),
    *("dr-grpo", "gspo", "cispo", "rloo", "reinforce++-baseline"),
)
OF_PENALTY = "urkl"  # what k1, k2, k3 and |log u| are meant to be: KL(π‖ref), in its form of low variance
BETAS, BOUNDS = (0.0, 0.5, 2.0), (0.5, 2.0)  # factors that are tried


@dataclass(frozen=True)
class Compared:
    """A method on this batch."""

    name: str
    loss: PolicyLoss
    advantage: Tensor  # [B] or [B,T]
    ref_logp_BT: Tensor | None
    rollout_logp_BT: Tensor | None
    denominator: float | None = None  # None: what the batch itself counts
    ran: bool = False

    def with_loss(self, **changes: Any) -> Compared:
        return replace(self, loss=self.loss.replace(**changes))


def compared(batch: Recorded, asked: Sequence[str] = ()) -> tuple[list[Compared], dict[str, str]]:
    """The method that ran first, if the file names it; and by name why others are left out."""
    ran = _ran(batch)
    chosen, left_out = [] if ran is None else [ran], {}
    for name in dict.fromkeys(_names(asked)):
        try:
            one = _preset(batch, algorithm(name), ran)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        if ran is not None and name == ran.name:
            if one.loss == ran.loss:
                continue
            one = replace(one, name=f"{name} as published")
        chosen.append(one)
    if not chosen:
        raise ValueError(f"no method can be replayed: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    return chosen, left_out


def _names(asked: Sequence[str]) -> Iterator[str]:
    for text in asked or USUAL:
        found = algorithms() if text == "all" else fnmatch.filter(algorithms(), text)
        if not found:
            raise ValueError(choose("algorithm", text, algorithms()))
        yield from found


def _ran(batch: Recorded) -> Compared | None:
    said = batch.about.get("method")
    if said is None:
        return None
    said = {"name": said} if isinstance(said, str) else said
    if not isinstance(said, Mapping) or "name" not in said:
        raise ValueError('metadata method must be a preset\'s name, or {"name": …, "options": {…}}')
    name = str(said["name"])
    published = None if "loss" in said else algorithm(name, **said.get("options", {}))
    loss = loss_of_data(said["loss"]) if published is None else published.loss
    advantage = batch.advantage
    if advantage is None:
        advantage = _advantage(batch, published or algorithm(name))
    ref_BT = batch.old_logp_BT if batch.ref_logp_BT is None and "ref_logp" in loss.needs else batch.ref_logp_BT
    denominator = batch.about.get("denominator")
    return Compared(name, loss, advantage, ref_BT, batch.rollout_logp_BT, denominator, ran=True)


def _preset(batch: Recorded, chosen: Algorithm, ran: Compared | None) -> Compared:
    """As published, with what the run has: its anchor, its sampler's correction, its constant."""
    loss = chosen.loss
    if chosen.curvature_gate or "keep" in loss.needs:
        raise ValueError("its gate needs the logits and the optimiser's moments")
    if chosen.reference == "teacher":
        raise ValueError("it learns from a teacher, which the batch does not have")
    if loss.clip is not None and "state_kl" in loss.clip.looks:
        raise ValueError("its clip measures a KL over the vocabulary")
    if loss.reduction == "constant":  # its size alone: directions are those of any constant
        longest = float(batch.old_logp_BT.shape[1])
        loss = loss.replace(constant=longest if ran is None or ran.loss.constant is None else ran.loss.constant)
    if ran is not None and ran.loss.mismatch is not None and loss.mismatch is None:
        rule = ran.loss.mismatch
        loss = loss.replace(mismatch=Mismatch("sequence") if loss.kl_to_go else rule)
    ref_BT = batch.ref_logp_BT
    if ref_BT is None and ("ref_logp" in loss.needs or chosen.advantage.beta):
        ref_BT = batch.old_logp_BT
    return Compared(chosen.name, loss, _advantage(batch, chosen), ref_BT, batch.rollout_logp_BT)


def _advantage(batch: Recorded, chosen: Algorithm) -> Tensor:
    """From the rewards of this file alone."""
    rule, known = chosen.advantage, batch.about.get("reward_range")
    if rule.kind == "greedy-baseline":
        raise ValueError("its baseline is the reward of a greedy response, which the batch does not have")
    if rule.needs_score_sq:
        raise ValueError("its baseline needs Σπ² of every token under the policy that sampled")
    rule = rule.for_rewards(None if known is None else (float(known[0]), float(known[1])))
    ref_BT = batch.old_logp_BT if batch.ref_logp_BT is None else batch.ref_logp_BT
    return rule(batch.reward_B, batch.group_B, mask=batch.mask_BT, old_logp=batch.old_logp_BT, ref_logp=ref_BT)


# ---- the same objective with exact weights ---------------------------------------------------------------------------


def exact(one: Compared) -> Compared:
    """The same advantages, divergence, β, anchor and level; no clip, no gate, the right weight on every term, and every
    token counted the same. A mean ratio of a response becomes the product that it stands for."""
    loss = one.loss
    row = DIVERGENCES.get(loss.divergence)
    level = "token" if loss.level == "token" else "sequence"
    rho = Mismatch("sequence" if loss.kl_to_go else None) if one.rollout_logp_BT is not None else None
    plain = PolicyLoss(
        divergence=loss.divergence if row is None or row.exact else OF_PENALTY,
        beta=loss.beta,
        estimator="reinforce",
        level=level,
        kl_to_go=loss.kl_to_go,
        mismatch=rho,
        max_log_ratio=loss.max_log_ratio,
    )
    return replace(one, loss=plain, denominator=None)


# ---- what a little more or less of a setting would do ----------------------------------------------------------------


def betas(one: Compared) -> dict[float, Compared]:
    """With other strengths of the KL in the loss; nothing where there is none."""
    if not one.loss.has_kl:
        return {}
    return {factor: one.with_loss(beta=factor * one.loss.beta) for factor in BETAS}


def bounds(one: Compared) -> dict[float, Compared]:
    """With the clip's bounds nearer or further; nothing where there are none."""
    place = "clip" if one.loss.clip is not None else "token_clip"
    rule = one.loss.clip or one.loss.token_clip
    scaled = {factor: _scaled(rule, factor) for factor in BOUNDS}
    return {factor: one.with_loss(**{place: clip}) for factor, clip in scaled.items() if clip is not None}


def _scaled(rule: Clip | None, factor: float) -> Clip | None:
    match rule:
        case Box() | LogBox() | DualClip() | Truncate():
            low = None if rule.low is None else min(factor * rule.low, 0.999)
            high = None if rule.high is None else factor * rule.high
            if isinstance(rule, DualClip) and rule.c is not None and high is not None and rule.c <= 1 + high:
                return None
            return replace(rule, low=low, high=high)
        case KL3() if rule.c is None:
            return replace(rule, delta=factor * rule.delta)
        case TrustRegion():
            return replace(rule, delta=factor * rule.delta)
    return None


def names_of(chosen: Iterable[Compared]) -> list[str]:
    return [one.name for one in chosen]
