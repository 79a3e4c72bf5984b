"""AdamW and schedule-free AdamW: parameter groups, learning rate, clipping, and the state as named tensors."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from .config import OptimConfig

EMBEDDING = re.compile(r"embed|\bw[tp]e\b")
FLOOR = 0.1  # of the learning rate, at the last step of a schedule
EPS = 1e-8


def make_optimizer(named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig) -> Optimizer:
    """Weight decay on matrices only: not on norms, biases and embeddings."""
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    groups: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, p in trained:
        groups[p.dim() >= 2 and not EMBEDDING.search(name)].append(p)
    made = [{"params": ps, "weight_decay": decayed * config.weight_decay} for decayed, ps in groups.items() if ps]
    if not made:
        raise ValueError("the model has no parameter that requires a gradient")
    if config.name == "schedule-free":
        return ScheduleFreeAdamW(made, lr=config.lr, betas=config.betas)
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for _, p in trained)
    return AdamW(made, lr=config.lr, betas=config.betas, eps=EPS, fused=fused, foreach=None if fused else True)


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """Of the optimiser step with this number, of ``total``, both from the run's start: 0 is the first."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    start = max(config.warmup - 1, 0)  # the first step at the full rate
    progress = min((step - start) / max(total - 1 - start, 1), 1.0)
    falling = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    schedule = config.schedule
    if schedule == "auto":
        schedule = "constant" if config.name == "schedule-free" else "linear"
    return config.lr * (FLOOR + (1 - FLOOR) * falling[schedule])


def clip_gradients(params: Iterable[Parameter], max_norm: float) -> float:
    """Scale the gradients down to ``max_norm`` and return the norm they had; one that is not finite changes nothing."""
    params = [p for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if norm.isfinite():
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)


class ScheduleFreeAdamW(Optimizer):
    """The Road Less Scheduled (arXiv 2405.15682). The parameters hold y; the average x, to be evaluated, is implied.

    z ← z − γ·d,  x ← (1 − c)·x + c·z,  y = (1 − β)·z + β·x,  with d Adam's direction at y (without momentum) plus the
    decay at y, and c this step's share of all weights so far, each the square of the largest γ until then. γ is the
    group's ``lr``, warmed up by whoever sets it: learning_rate().
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ) -> None:
        if not 0 < betas[0] < 1:
            raise ValueError(f"betas must start between 0 and 1 with schedule-free; got {betas[0]}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": EPS})
        for group in self.param_groups:
            group |= {"step": 0, "largest_lr": 0.0, "total_weight": 0.0}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        lr, (beta, beta2) = float(group["lr"]), group["betas"]
        group["step"] += 1
        group["largest_lr"] = max(lr, group["largest_lr"])
        weight = group["largest_lr"] ** 2
        group["total_weight"] += weight
        c = weight / group["total_weight"] if weight else 0.0
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = {"z": p.detach().clone(), "square": torch.zeros_like(p)}
        grads = [p.grad for p in params if p.grad is not None]
        z, squares = ([self.state[p][key] for p in params] for key in ("z", "square"))
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 1 - beta2)
        scale = torch._foreach_div(squares, 1 - beta2 ** group["step"])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        direction = torch._foreach_div(grads, scale)
        if group["weight_decay"]:
            torch._foreach_add_(direction, params, alpha=group["weight_decay"])
        # with x = (y − (1 − β)·z)/β put in, y ← (1 − c)·y + c·z − γ·(1 − β·(1 − c))·d for the z before its step
        torch._foreach_lerp_(params, z, c)
        torch._foreach_add_(params, direction, alpha=-lr * (1 - beta * (1 - c)))
        torch._foreach_add_(z, direction, alpha=-lr)

    @torch.no_grad()
    def averaged(self, params: Iterable[Tensor]) -> list[Tensor]:
        """x of each parameter, as new tensors."""
        beta = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        return [p.lerp(self.state[p]["z"], 1 - 1 / beta[p]) if self.state.get(p) else p.clone() for p in params]


@contextlib.contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Within: the parameters to evaluate and to ship, x of schedule-free. After: the very bits of before."""
    if not isinstance(optimizer, ScheduleFreeAdamW):
        yield
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        before = [p.clone() for p in params]
        torch._foreach_copy_(params, optimizer.averaged(params))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, before)


# ---- state -----------------------------------------------------------------------------------------------------------

COUNTERS = ("step", "largest_lr", "total_weight")  # of a schedule-free group


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """The whole state by name, ``layer.weight/exp_avg``; not the learning rate: the step decides it. Not copied."""
    found: dict[str, Tensor] = {}
    names = _names(optimizer, named_parameters)
    for p, name in names.items():
        state = optimizer.state.get(p) or {"none": torch.zeros(0)}  # never had a gradient
        found |= {f"{name}/{key}": torch.as_tensor(value) for key, value in state.items()}
    for i, group in enumerate(optimizer.param_groups):
        counters = (key for key in COUNTERS if key in group)
        found |= {f"group/{i}/{key}": torch.tensor(group[key], dtype=torch.float64) for key in counters}
    return found


def load_optimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]], tensors: Mapping[str, Tensor]
) -> None:
    """The state that optimizer_tensors() gave, bit for bit, into an optimiser made in the same way."""
    names = _names(optimizer, named_parameters)
    left = dict(tensors)
    state: dict[int, dict[str, Tensor]] = {}
    keys = ("z", "square") if isinstance(optimizer, ScheduleFreeAdamW) else ("step", "exp_avg", "exp_avg_sq")
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    for i, p in enumerate(params):
        if left.pop(f"{names[p]}/none", None) is None:
            state[i] = {key: _pop(left, f"{names[p]}/{key}", None if key == "step" else p).clone() for key in keys}
    groups = optimizer.state_dict()["param_groups"]
    for i, group in enumerate(groups):
        counters = {key: _pop(left, f"group/{i}/{key}", None).item() for key in COUNTERS if key in group}
        group |= {key: int(value) if key == "step" else value for key, value in counters.items()}
    if left:
        raise ValueError(f"the optimiser state is of another model or optimiser: it has {next(iter(left))!r}")
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[Parameter, str]:
    by_parameter = {p: name for name, p in named_parameters}
    return {p: by_parameter[p] for group in optimizer.param_groups for p in group["params"]}


def _pop(tensors: dict[str, Tensor], name: str, like: Tensor | None) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ValueError(f"the optimiser state is of another model or optimiser: it has no {name!r}")
    shape = [] if like is None else list(like.shape)
    if list(tensor.shape) != shape:
        raise ValueError(f"the optimiser state is of another model: {name!r} is {list(tensor.shape)}, not {shape}")
    return tensor
