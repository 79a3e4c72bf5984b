"""The policy that anchors the KL term: the sampling policy itself, or a copy that is renewed by a rule."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm
from ..policy import Policy
from .batch import Batch, micro_batches
from .config import ReferenceConfig
from .optim import HALF

AVERAGE = "average/"  # in front of the names of averages in a checkpoint


def rule_of(algorithm: Algorithm, config: ReferenceConfig) -> str:
    """old, every, kl, ema or frozen. Without a KL term there is nothing to anchor: old, which costs nothing."""
    has_kl = (algorithm.loss.divergence != "none" and algorithm.loss.beta > 0) or algorithm.advantage.beta > 0
    if not has_kl:
        return "old"
    if config.update == "auto":
        return "old" if algorithm.reference == "old" else "frozen"
    return config.update


class Reference:
    """``policy`` is None where the reference is the sampling policy: no second model is held.

    A moving average of weights in half precision is kept in float32, as its steps are too small for half precision.
    """

    def __init__(self, policy: Policy, rule: str, config: ReferenceConfig):
        self.rule, self.config = rule, config
        self.policy: Policy | None = None
        self.average_kl = 0.0  # moving average of the KL per token from the reference
        self.renewals = 0
        if rule != "old":
            model = copy.deepcopy(policy.model).requires_grad_(False)
            self.policy = Policy(model, policy.tokenizer, policy.temperature)
        self.averages = {name: x.float() for name, x in self._weights().items() if rule == "ema" and x.dtype in HALF}

    @torch.no_grad()
    def logp(self, batch: Batch, micro_tokens: int | None) -> Tensor | None:
        """[B,T], or None where the reference is the sampling policy."""
        return None if self.policy is None else batch_logp(self.policy, batch, micro_tokens)

    @torch.no_grad()
    def after_step(self, step: int, policy: Policy, kl: float | None) -> bool:
        """Renew the copy if its rule says so. ``kl``: per token, current policy from reference, in this step."""
        if self.policy is None or self.rule == "frozen":
            return False
        if self.rule == "ema":
            self._blend(policy, 1 - self.config.decay)
            return True
        if self.rule == "kl":
            past = self.config.smoothing
            if kl is not None:
                self.average_kl = past * self.average_kl + (1 - past) * kl
            due = self.average_kl > self.config.kl
        else:
            due = step % self.config.every == 0
        if due:
            self._blend(policy, 1.0)
            self.average_kl = 0.0
            self.renewals += 1
        return due

    def _blend(self, policy: Policy, share: float) -> None:
        for (name, own), new in zip(self._weights().items(), _floating(policy.model).values(), strict=True):
            if share == 1:
                own.copy_(new)
            elif name in self.averages:
                own.copy_(self.averages[name].lerp_(new.float(), share))
            else:
                own.lerp_(new.to(own.dtype), share)

    def _weights(self) -> dict[str, Tensor]:
        return {} if self.policy is None else _floating(self.policy.model)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        if self.policy is None:
            return {}
        return dict(self.policy.model.state_dict()) | {AVERAGE + name: x for name, x in self.averages.items()}

    def state(self) -> dict[str, Any]:
        return {"rule": self.rule, "average_kl": self.average_kl, "renewals": self.renewals}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.average_kl, self.renewals = state["average_kl"], state["renewals"]
        if self.policy is not None:
            self.policy.model.load_state_dict({k: x for k, x in tensors.items() if not k.startswith(AVERAGE)})
            for name, x in self.averages.items():
                x.copy_(tensors[AVERAGE + name])


def _floating(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: x.detach() for name, x in named if x.is_floating_point()}


@torch.no_grad()
def batch_logp(policy: Policy, batch: Batch, micro_tokens: int | None) -> Tensor:
    """Log-probabilities of a batch's responses under a policy, [B,T]."""
    out_BT = torch.zeros_like(batch.old_logp_BT)
    cuts = list(micro_batches(batch, micro_tokens, policy.packs))
    parts = [batch.rows(index) for index in cuts]
    packings = [policy.pack(part.start_B, part.mask_BT, part.ids_BL.shape[1], part.group_B) for part in parts]
    for i, (index, part) in enumerate(zip(cuts, parts, strict=True)):
        scored = policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, packing=packings[i])
        packings[i] = None
        out_BT[index, : scored.logp_BT.shape[1]] = scored.logp_BT
    return out_BT
