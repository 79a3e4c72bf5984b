"""The policy that anchors the KL term: the sampling policy itself, a copy that is renewed by a rule, or a teacher.

Where an adapter is trained, the copy is one of the adapter's weights, or none at all: the model with the adapter off.
A teacher is another model of the same tokens; it stays as it is, and checkpoints have its name alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import ALONE, World
from ..distributed.shards import ShardedPolicy, cut, local, swapped_in
from ..loss.anchor import Renewal
from ..models import adapters
from ..models.four_bits import make_dense
from ..models.loading import load
from ..models.policy import Policy
from ..run.config import Config, ReferenceConfig
from ..run.teacher import check_rows, check_tokens, naming, teacher_of
from .batch import Batch, rank_micro_batches
from .optim import HALF

OF_ANY_MODEL = ("token", "cache_dir", "local_files_only", "trust_remote_code")  # of model_options
AVERAGE = "average/"  # in front of the names of averages in a checkpoint


class Reference:
    """``policy`` is None where the reference is the sampling policy: no second model is held.

    Where an adapter is trained, ``policy`` is the trained one, which is scored with the weights in ``adapter`` instead
    of its own, or with its adapter off: a frozen reference of an adapter that began as nothing.
    A moving average of weights in half precision is kept in float32, as its steps are too small for half precision.
    Where weights are sharded, a copy of them is too: ``whole`` is what it is made from.
    """

    def __init__(
        self,
        policy: Policy,
        rule: str,
        config: ReferenceConfig,
        world: World = ALONE,
        whole: Policy | None = None,
        teacher: Policy | None = None,
    ):
        self.rule, self.config, self.world = rule, config, world
        self.policy: Policy | None = None
        self.adapter: dict[str, Tensor] | None = None
        self.renewal = Renewal(rule, config)
        self.teacher = None if teacher is None or config.model is None else teacher_of(config.model)
        if teacher is not None:
            self.policy = ShardedPolicy(teacher, world, frozen=True) if world.sharded else teacher
        elif rule != "old" and policy.adapted:
            self.policy = policy
            if rule != "frozen" or not policy.fresh:
                self.adapter = {name: x.clone() for name, x in adapters.weights(policy.model).items()}
        elif rule != "old" and world.sharded:
            self.policy = ShardedPolicy(whole or policy, world, frozen=True)
        elif rule != "old":
            model = copy.deepcopy(policy.model).requires_grad_(False)
            self.policy = Policy(model, policy.tokenizer, policy.temperature)
        self.averages = {name: x.float() for name, x in self._weights().items() if rule == "ema" and x.dtype in HALF}

    @torch.no_grad()
    def logp(self, batch: Batch, micro_tokens: int) -> Tensor | None:
        """[B,T], or None where the reference is the sampling policy."""
        if self.policy is None:
            return None
        with self._adapter():
            return batch_logp(self.policy, batch, micro_tokens, self.world)

    def _adapter(self) -> AbstractContextManager[None]:
        """Within, the policy is the reference."""
        if self.policy is None or not self.policy.adapted:
            return nullcontext()
        model = self.policy.model
        if self.adapter is not None and self.world.sharded:
            return swapped_in(self.policy, self.adapter)
        return adapters.switched_off(model) if self.adapter is None else adapters.swapped_in(model, self.adapter)

    @torch.no_grad()
    def after_step(self, step: int, policy: Policy, kl: float | None, optimizer_steps: int = 1) -> bool:
        """Renew the copy if its rule says so. ``kl``: per token, current policy from reference, in this step."""
        if self.policy is None or self.rule == "frozen":
            return False
        if self.rule == "ema":
            self._blend(policy, 1 - self.config.decay)
            return True
        by_iterations = self.config.count == "iterations"
        due = self.renewal.due(step, kl) if by_iterations else self.renewal.due(None, kl, optimizer_steps)
        if due:
            self._blend(policy, 1.0)
            self.renewal.renewed()
        return due

    def _blend(self, policy: Policy, share: float) -> None:
        for (name, held), other in zip(self._weights().items(), _weights(policy).values(), strict=True):
            copy_of, new = local(held), local(other)
            if share == 1:
                copy_of.copy_(new)
            elif name in self.averages:
                copy_of.copy_(local(self.averages[name]).lerp_(new.float(), share))
            else:
                copy_of.lerp_(new.to(copy_of.dtype), share)

    def _weights(self) -> dict[str, Tensor]:
        if self.policy is None or self.teacher is not None:
            return {}
        return (self.adapter or {}) if self.policy.adapted else _weights(self.policy)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        if self.policy is None or self.teacher is not None:
            return {}
        weights = self._weights() if self.policy.adapted else self.policy.model.state_dict()
        return dict(weights) | {AVERAGE + name: x for name, x in self.averages.items()}

    def state(self) -> dict[str, Any]:
        state = {"rule": self.rule, **self.renewal.state(), "held": bool(self._weights())}
        return state if self.teacher is None else state | {"teacher": self.teacher}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """``tensors``: nothing where the state says that none are held."""
        self.renewal.load(state)
        if self.policy is None or self.teacher is not None:
            return
        if not state["held"]:
            self.adapter = None  # the adapter began as nothing, in the process that began the run
            return
        weights = {name: x for name, x in tensors.items() if not name.startswith(AVERAGE)}
        if self.adapter is not None:
            _copy(self.adapter, weights)
        elif self.world.sharded:
            _copy(self.policy.model.state_dict(), weights)
        else:
            self.policy.model.load_state_dict(weights)
        _copy(self.averages, {name: tensors[AVERAGE + name] for name in self.averages})


def load_teacher(config: Config, policy: Policy) -> Policy:
    """The model that ``reference.model`` names, beside the trained one, whose tokens it has to know."""
    name = config.reference.model
    assert name is not None
    options = {key: value for key, value in config.model_options.items() if key in OF_ANY_MODEL}
    path = teacher_of(name)
    with naming(path):
        model, tokenizer = load(path, dtype=policy.model.dtype, device=policy.device, options=options)
    if adapters.adapted(model):
        make_dense(model)
        model = vars(model)[adapters.WRAPPER].merge_and_unload()
    check_tokens(config, policy.tokenizer.get_vocab(), tokenizer.get_vocab())
    check_rows(config, policy.model, model)
    return Policy(model.requires_grad_(False), tokenizer, policy.temperature)


@torch.no_grad()
def _copy(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Of each tensor the part that this rank holds."""
    for name, x in into.items():
        local(x).copy_(cut(values[name], x))


def _weights(policy: Policy) -> dict[str, Tensor]:
    """What a reference has a copy of."""
    return adapters.weights(policy.model) if policy.adapted else floating(policy.model)


def floating(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: x.detach() for name, x in named if x.is_floating_point()}


@torch.no_grad()
def batch_logp(policy: Policy, batch: Batch, micro_tokens: int, world: World = ALONE) -> Tensor:
    """Log-probabilities of a batch's responses under a policy, [B,T]. Each rank computes a share of them."""
    out_BT = torch.zeros_like(batch.old_logp_BT)
    micro = rank_micro_batches(batch, micro_tokens, policy.packs, world)
    layouts = [part.layout() for _, part in micro]
    for (index, part), layout in zip(micro, layouts, strict=True):
        rows = part.ids_BL, part.start_B, part.mask_BT, part.group_B
        scored = policy.score(*rows, packing=policy.pack(*layout), kept=part.kept)
        if index is not None:
            out_BT[index, : scored.logp_BT.shape[1]] = scored.logp_BT
    policy.rest()
    world.add(out_BT)
    return out_BT
