"""Whose log-probabilities count as those of the sampling policy: the engine's, or the trainer's own."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..distributed.ranks import ALONE, World
from ..kernels.kept import Kept
from ..kernels.logp import head_logits
from ..loss.objective import k3
from ..loss.policy_loss import PolicyLoss
from ..models.policy import Policy
from ..run.config import Config
from .batch import Batch, rank_micro_batches
from .progress import Progress

SQUARES_ELEMENTS = 2**25  # logits held at once by batch_score_sq
HARMLESS = 2e-4  # KL per token between engine and trainer: see OldLogp


class OldLogp:
    """Whether the old log-probabilities are the engine's, or the trainer's of before the first optimiser step.

    In float32 the engine's are the trainer's. In half precision they differ, and what differs is taken for drift: the
    ratios start at e^δ instead of 1. A KL of k per token means a δ of about √(2k), which is 0.02 at HARMLESS: a tenth
    of the usual clip range of 0.2, and far below what an optimiser step does. So the engine's are taken while the KL
    that the step before has measured is no more; the first step computes them. At sequence level the δ of hundreds of
    tokens add up, against a clip range of GSPO's 3e-4 too: there they are always recomputed. A mismatch rule needs
    both. With top-p, top-k or min-p all of this is over the sets that the engine drew from.

    vLLM computes with kernels of its own, whatever the precision: with it they are recomputed unless told otherwise.
    Where a step trains on samples of earlier policies too, the engine's are what each token was drawn with: old is then
    that policy, whatever the precision, and the weights are exact. Recomputed, old is the policy at the start of the
    step, and the weight old/behaviour goes on top (setup.corrected).
    From keys and values of 8 bits they are another policy's: always recomputed, and the engine's go to the loss beside
    them, as what was sampled from; setup.corrected gives the loss the weight that makes that exact.
    """

    def __init__(self, config: Config, loss: PolicyLoss, dtype: torch.dtype, progress: Progress | None = None):
        rollout, setting = config.rollout, config.rollout.old_logp
        self.progress = Progress() if progress is None else progress
        if setting == "engine" and loss.needs_sampler:
            raise ValueError("rollout.old_logp=engine leaves loss.mismatch nothing to correct: auto or recompute")
        exact = dtype in (torch.float32, torch.float64)
        wary = rollout.engine == "vllm" or (not exact and loss.level != "token")
        rounded = rollout.cache_dtype != "auto"
        wary = wary and not config.stale
        exact = exact or config.stale
        self.always = setting == "recompute" or loss.needs_sampler or rounded or (setting == "auto" and wary)
        self.never = not self.always and (setting == "engine" or exact)

    @property
    def recompute(self) -> bool:
        kl = self.progress.mismatch
        return self.always or not (self.never or (kl is not None and kl <= HARMLESS))

    def measure(self, metrics: dict[str, float]) -> None:
        self.progress.mismatch = metrics.get("mismatch/kl", self.progress.mismatch)


def with_logp(batch: Batch, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None, needs_reference: bool) -> Batch:
    """The batch with old_logp as recomputed, if it was, and with the log-probabilities of the reference."""
    if old_logp_BT is not None:
        batch = replace(batch, old_logp_BT=old_logp_BT, rollout_logp_BT=batch.old_logp_BT)
    if ref_logp_BT is None and needs_reference:  # the reference is the sampling policy, and the loss asks to be told
        ref_logp_BT = batch.old_logp_BT
    return replace(batch, ref_logp_BT=ref_logp_BT)


def engine_mismatch(batch: Batch, logp_BT: Tensor) -> dict[str, float]:
    """Before the first optimiser step the policy is the one that sampled: what differs from ``logp_BT`` is the engine.

    Where old_logp was recomputed, the loss reports it.
    """
    if batch.rollout_logp_BT is not None:
        return {}
    log_rho = (logp_BT - batch.old_logp_BT)[batch.mask_BT]
    metrics = {"mismatch/max_log_ratio": float(log_rho.abs().max()), "mismatch/kl": float(k3(log_rho).mean())}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@torch.no_grad()
def batch_score_sq(policy: Policy, batch: Batch, micro_tokens: int, world: World = ALONE) -> Tensor:
    """|∂ log π/∂ logits|² = 1 − 2π_a + Σπ² of the responses' tokens, [B,T]: a pass of its own, for the optimal token
    baseline. Each rank computes a share. Logits are held for a few tokens at a time."""
    out_BT = torch.zeros_like(batch.old_logp_BT)
    for index, part in rank_micro_batches(batch, micro_tokens, policy.packs, world):
        scored = policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, kept=part.kept)
        if index is None:  # another rank has more: take part
            continue
        assert scored.hidden_NH is not None
        head_VH = policy.head()
        squares_N = _sums_of_squares(scored.hidden_NH / policy.temperature, head_VH, part.kept)
        squares_BT = torch.zeros_like(scored.logp_BT).masked_scatter(part.mask_BT, squares_N)
        out_BT[index, : squares_BT.shape[1]] = (1 - 2 * scored.logp_BT.exp() + squares_BT) * part.mask_BT
    policy.rest()
    world.add(out_BT)
    return out_BT


def _sums_of_squares(hidden_NH: Tensor, head_VH: Tensor, kept: Kept | None) -> Tensor:
    """Σπ² over the vocabulary or, with truncated sampling, over the set that was kept. [N]"""
    rows = max(1, SQUARES_ELEMENTS // len(head_VH))
    hidden = torch.split(hidden_NH, rows)
    sets = [None] * len(hidden) if kept is None else kept.to(hidden_NH.device).split(rows)
    squares = []
    for h_NH, some in zip(hidden, sets, strict=True):
        logits_NV = head_logits(h_NH, head_VH)
        if some is not None:
            logits_NV = logits_NV.masked_fill(some.outside(len(head_VH)), -torch.inf)
        squares.append(logits_NV.softmax(-1).square_().sum(-1))
    return torch.cat(squares)
