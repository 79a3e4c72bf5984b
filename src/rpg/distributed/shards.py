"""Weights spread over the ranks: FSDP2 through torch's own API (``fully_shard``), a group for every decoder layer.

A sharded policy has no weights of its own but a part of each, by rows: parameters, gradients and what the optimiser
keeps are DTensors or their local parts. A whole copy for sampling stays beside it, and is filled by ``copy_into``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.custom_attention import configs_of
from ..models.policy import Policy
from .ranks import World


@torch.no_grad()
def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor, in its place: all of it where it is not sharded."""
    part: Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return part


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "to_local")


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part as what it is a part of, where the parameter is sharded; numbers that all share stay."""
    if not is_sharded(parameter) or not part.dim():
        return part
    from torch.distributed.tensor import DTensor

    mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole: Tensor = DTensor.from_local(part, mesh, places, shape=parameter.shape, stride=parameter.stride())
    return whole


def cut(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor; all of it where the parameter is not sharded."""
    if not is_sharded(parameter) or not whole.dim():
        return whole
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    rank, chunks = mesh.get_local_rank(), whole.chunk(mesh.size())
    return chunks[rank] if rank < len(chunks) else whole[:0]


@torch.no_grad()
def whole_of(x: Tensor) -> Tensor:
    """Of all ranks' parts, in one all-gather that has ended when this returns. All ranks have to call it."""
    if not is_sharded(x):
        return x
    mesh, mine = x.device_mesh, local(x)  # type: ignore[attr-defined]
    rows = -(-x.shape[0] // mesh.size())  # of a part; the last ones may have fewer
    padded = mine.new_zeros(rows, *x.shape[1:])
    padded[: len(mine)] = mine
    whole = mine.new_empty(rows * mesh.size(), *x.shape[1:])
    dist.all_gather(list(torch.split(whole, rows)), padded, mesh.get_group())
    return whole[: x.shape[0]]


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, one after the other, on the CPU of the ranks that ``keep`` them. All ranks have to call it."""
    wholes: dict[str, Tensor] = {}
    for name, x in tensors.items():
        whole = whole_of(x)
        if keep:
            wholes[name] = whole.cpu()
    return wholes


@contextmanager
def swapped_in(policy: Policy, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the trained weights are these, in the places of the policy's own."""
    places = [local(p) for _, p in policy.parameters()]
    with torch.no_grad():
        before = [x.clone() for x in places]
        try:
            torch._foreach_copy_(places, [local(others[name]) for name, _ in policy.parameters()])
            yield
        finally:
            torch._foreach_copy_(places, before)


class ShardedPolicy(Policy):
    """A copy of a policy whose weights are spread over the ranks. ``frozen``: it is never trained.

    What was found out about the whole policy (its head, whether it packs) holds for it too.
    """

    def __init__(self, policy: Policy, world: World, frozen: bool = False):
        vars(self).update(vars(policy))
        self.model = _sharded_copy(policy.model, world, frozen)
        self._configs = configs_of(self.model)
        self._named = list(self.model.named_parameters())  # while a pass runs the model has whole ones instead
        self._head = self.model.get_output_embeddings().weight
        self.model._rpg_compute = MethodType(lambda model, *args: self._compute_whole(*args), self.model)
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(self.model, "_rpg_compute")
        self._first_pass()

    @torch.no_grad()
    def _first_pass(self) -> None:
        """A few tokens: what FSDP puts off until then is done, and a rank that cannot be reached is known."""
        ids_BL = torch.ones(1, 3, dtype=torch.long, device=self.device)
        mask_BT = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        self.score(ids_BL, torch.tensor([2], device=self.device), mask_BT)
        self.rest()

    @property
    def device(self) -> torch.device:
        return local(self._named[0][1]).device

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self._named if p.requires_grad]

    def head_parameter(self) -> Tensor:
        head: Tensor = self._head
        return head

    def rest(self) -> None:
        """Free the embeddings and the head, which are kept whole from a forward to its backward pass."""
        self.model.reshard()

    def _compute(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor, Tensor | None] = self.model._rpg_compute(*args)
        return out

    def _compute_whole(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Within FSDP's hooks, which do not like views."""
        logp_N, entropy_N, hidden_NH = Policy._compute(self, *args)
        return logp_N.clone(), entropy_N.clone(), hidden_NH

    def _call(self, **inputs: Any) -> Any:
        return self.model.forward(**inputs)  # the hooks are those of _rpg_compute

    @torch.no_grad()
    def copy_into(self, policy: Policy) -> None:
        """The trained weights into the policy that is whole, one after the other."""
        for (name, shard), (whole_name, whole) in zip(self.parameters(), policy.parameters(), strict=True):
            assert name == whole_name
            whole.copy_(whole_of(shard))

    def save(self, folder: Any) -> None:
        raise NotImplementedError("the whole policy is what is saved")


def _sharded_copy(model: Any, world: World, frozen: bool) -> Any:
    """The parameters are shared with the original until each is cut, so that there are never two whole ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert world.device is not None
    if not frozen:
        refuse_experts(model)
    sharded = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    mesh = init_device_mesh(world.device.type, (world.size,))
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    try:
        for layer in layers_of(sharded):
            fully_shard(layer, reshard_after_forward=True, **how)
        fully_shard(sharded, reshard_after_forward=frozen, **how)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{type(model).__name__} cannot be sharded: {' '.join(str(error).split())}") from error
    for module in (
        sharded,
        *layers_of(sharded),
    ):  # gradients are added, not averaged: the loss has the step's denominator
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sharded.requires_grad_(False) if frozen else sharded


def refuse_experts(model: Any) -> None:
    """Experts that are modules of their own and are trained: of one that no token of a rank came to, that rank has no
    gradient, and would wait for ever for the others, who add up theirs."""
    for layer in layers_of(model):
        for name, module in layer.named_modules():
            listed = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) and len(module) > 1
            if listed and "expert" in name.lower() and any(p.requires_grad for p in module.parameters()):
                raise ValueError(
                    f"{type(model).__name__} keeps its experts as modules of their own ({name}), which cannot be "
                    "trained by several processes: use one, or an adapter that leaves them out"
                )


def layers_of(model: Any) -> list[Any]:
    """Decoder layers; none that this knows: the model is one group."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
