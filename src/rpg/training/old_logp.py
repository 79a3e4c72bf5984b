"""Whose log-probabilities count as those of the sampling policy: the engine's, or the trainer's own."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..loss.objective import k3
from ..loss.policy_loss import PolicyLoss
from ..run.config import Config
from .batch import Batch
from .progress import Progress

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
    """

    def __init__(self, config: Config, loss: PolicyLoss, dtype: torch.dtype, progress: Progress | None = None):
        rollout, setting = config.rollout, config.rollout.old_logp
        self.progress = Progress() if progress is None else progress
        if setting == "engine" and loss.needs_sampler:
            raise ValueError("rollout.old_logp=engine leaves loss.mismatch nothing to correct: auto or recompute")
        exact = dtype in (torch.float32, torch.float64)
        wary = rollout.engine == "vllm" or (not exact and loss.level != "token")
        self.always = setting == "recompute" or loss.needs_sampler or (setting == "auto" and wary)
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
