"""AdamW and schedule-free AdamW: master weights, groups, learning rate, clipping, the state as named tensors."""

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

from ..distributed.ranks import ALONE, World
from ..distributed.shards import cut, is_sharded, like, local
from ..run.config import OptimConfig

EMBEDDING = re.compile(r"embed|\bw[tp]e\b")
FLOOR = 0.1  # of the learning rate, at the last step of a schedule
EPS = 1e-8
HALF = (torch.bfloat16, torch.float16)
State = tuple[Parameter, str]  # a master, and what is held for it


def make_optimizer(named_parameters: Iterable[tuple[str, Parameter]], config: OptimConfig) -> MixedOptimizer:
    """Weight decay on matrices only: not on norms, biases and embeddings."""
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    masters: dict[Tensor, Parameter] = {p: _master(p) for _, p in trained}
    by_decay: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, p in trained:
        by_decay[p.dim() >= 2 and not EMBEDDING.search(name)].append(masters[p])
    groups = [{"params": ps, "weight_decay": decayed * config.weight_decay} for decayed, ps in by_decay.items() if ps]
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient")
    if config.name == "schedule-free":
        return MixedOptimizer(ScheduleFreeAdamW(groups, lr=config.lr, betas=config.betas), masters)
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for _, p in trained)
    adamw = AdamW(groups, lr=config.lr, betas=config.betas, eps=EPS, fused=fused, foreach=None if fused else True)
    return MixedOptimizer(adamw, masters)


def _master(p: Parameter) -> Parameter:
    """What is stepped: in float32, and of a sharded parameter this rank's part, in its place where it is float32."""
    if p.dtype in HALF:
        return Parameter(local(p).detach().float())
    return Parameter(local(p).detach()) if is_sharded(p) else p


class MixedOptimizer:
    """An optimiser whose arithmetic is float32, whatever the parameters are.

    A parameter of half precision has a float32 master. The moments are the master's, micro-batches' gradients are
    summed at the master, and after a step the parameter, in its place, is the master rounded. (bfloat16 has 8 bits: an
    update below a 256th of a weight would be lost in it.) Any other parameter is its own master. Of sharded parameters
    each rank steps its part.
    """

    def __init__(self, optimizer: Optimizer, masters: dict[Tensor, Parameter]):
        self.optimizer, self.masters = optimizer, masters  # by parameter, in the model's order
        self._apart = [(p, master) for p, master in masters.items() if p is not master]
        self._rounded = [(local(p), master) for p, master in self._apart if p.dtype in HALF]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def schedule_free(self) -> bool:
        """Whether the weights to evaluate and to ship are an average, not those that are trained."""
        return isinstance(self.optimizer, ScheduleFreeAdamW)

    @property
    def needs_parameters(self) -> bool:
        """Whether a checkpoint has to hold the trained weights too: not the ones to ship, nor in the state, as masters
        are."""
        return self.schedule_free and len(self._rounded) < len(self.masters)

    @property
    def stepped(self) -> bool:
        """Whether it has made a step."""
        return bool(self.optimizer.state)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Its moments; empty before its first step."""
        return self.optimizer.state.get(self.masters[parameter]) or {}

    def idle_in_sampling(self) -> dict[State, Tensor]:
        """What only training needs: masters, where the model has weights of its own, and moments."""
        rounded = {master for _, master in self._rounded}
        held: dict[State, Tensor] = {}
        for master in self.masters.values():
            if master in rounded:
                held[master, "master"] = master
            state = self.optimizer.state.get(master) or {}
            held |= {(master, key): x for key, x in state.items() if isinstance(x, Tensor) and x.dim()}
        return held

    @torch.no_grad()
    def accumulate(self) -> None:
        """After a micro-batch: its gradients go into the float32 sums and are dropped."""
        first: tuple[list[Tensor], list[Tensor]] = [], []
        later: tuple[list[Tensor], list[Tensor]] = [], []
        for p, master in self._apart:
            if p.grad is None:
                continue
            sums, grads = first if master.grad is None else later
            if master.grad is None:
                master.grad = torch.empty_like(master)
            sums.append(master.grad)
            grads.append(local(p.grad))
            p.grad = None
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def sum_of(self, parameter: Tensor) -> Tensor | None:
        """Where gradients of a parameter are summed until the step, for who adds to it directly; None: not trained."""
        master = self.masters.get(parameter)
        if master is not None and master.grad is None:
            master.grad = torch.zeros_like(master)
        return None if master is None else master.grad

    def clip(self, max_norm: float, world: World = ALONE) -> float:
        """clip_gradients of the sums."""
        self.accumulate()
        return clip_gradients(self.masters.values(), max_norm, world)

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Parameters of half precision from their masters."""
        if self._rounded:
            torch._foreach_copy_([p for p, _ in self._rounded], [master for _, master in self._rounded])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for p, _ in self._apart:
            p.grad = None


def learning_rate(config: OptimConfig, step: int, total: int, used: float = 0.0) -> float:
    """Of the optimiser step with this number, of ``total``, both from the run's start: 0 is the first. ``used``: the
    share of another budget, tokens, that is used up before it; a schedule follows what is further."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    start = max(config.warmup - 1, 0)  # the first step at the full rate
    progress = min(max((step - start) / max(total - 1 - start, 1), used), 1.0)
    falling = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    schedule = config.schedule
    if schedule == "auto":
        schedule = "constant" if config.name == "schedule-free" else "linear"
    return config.lr * (FLOOR + (1 - FLOOR) * falling[schedule])


def clip_gradients(params: Iterable[Parameter], max_norm: float, world: World = ALONE) -> float:
    """Scale the gradients down to ``max_norm`` and return the norm they had; one that is not finite changes nothing.

    The norm is that of all ranks' parts.
    """
    params = [p for p in params if p.grad is not None]
    norm = world.norm(torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))
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
        return [self._average(p, beta[p], p.device) for p in params]

    def _average(self, p: Tensor, beta: float, device: torch.device) -> Tensor:
        """Computed on ``device``, wherever the state lies."""
        here = p.to(device)
        return here.lerp(self.state[p]["z"].to(device), 1 - 1 / beta) if self.state.get(p) else here.clone()

    @torch.no_grad()
    def put_average(self, masters: Mapping[Tensor, Parameter]) -> None:
        """x into each parameter, where ``masters`` are those that are stepped: one at a time, for the memory."""
        beta = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        for p, master in masters.items():
            local(p).copy_(self._average(master, beta[master], local(p).device))


@contextlib.contextmanager
def averaged_weights(optimizer: MixedOptimizer) -> Iterator[None]:
    """Within: the parameters to evaluate and to ship, x of schedule-free. After: the very bits of before."""
    if not isinstance(optimizer.optimizer, ScheduleFreeAdamW):
        yield
        return
    params = [local(p) for p in optimizer.masters]
    with torch.no_grad():
        before = [p.clone() for p in params]
        optimizer.optimizer.put_average(optimizer.masters)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, before)


# ---- state -----------------------------------------------------------------------------------------------------------

COUNTERS = ("step", "largest_lr", "total_weight")  # of a schedule-free group


def optimizer_tensors(
    optimizer: MixedOptimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> dict[str, Tensor]:
    """The whole state by name, ``layer.weight/exp_avg``; not the learning rate: the step decides it. Not copied.

    Of sharded parameters sharded: shards.gathered makes them whole.
    """
    tensors: dict[str, Tensor] = {}
    for p, name in _names(optimizer, named_parameters).items():
        if state := optimizer.state_of(p):
            tensors |= {f"{name}/{key}": like(torch.as_tensor(value), p) for key, value in state.items()}
        else:
            tensors[f"{name}/none"] = torch.zeros(0)  # never had a gradient
        if p.dtype in HALF:
            tensors[f"{name}/master"] = like(optimizer.masters[p].detach(), p)
    for i, group in enumerate(optimizer.param_groups):
        counters = (key for key in COUNTERS if key in group)
        tensors |= {f"group/{i}/{key}": torch.tensor(group[key], dtype=torch.float64) for key in counters}
    return tensors


@torch.no_grad()
def load_optimizer(
    optimizer: MixedOptimizer, named_parameters: Iterable[tuple[str, Parameter]], tensors: Mapping[str, Tensor]
) -> None:
    """The state that optimizer_tensors() gave, bit for bit, into an optimiser made in the same way.

    Masters come with it, and the parameters that they round to.
    """
    names = _names(optimizer, named_parameters)
    left = dict(tensors)
    inner = optimizer.optimizer
    keys = ("z", "square") if isinstance(inner, ScheduleFreeAdamW) else ("step", "exp_avg", "exp_avg_sq")
    states: dict[Parameter, dict[str, Tensor]] = {}
    stored: dict[Parameter, Tensor] = {}
    for p, name in names.items():
        master = optimizer.masters[p]
        if left.pop(f"{name}/none", None) is None:
            wholes = {key: _pop(left, f"{name}/{key}", None if key == "step" else p) for key in keys}
            states[master] = {key: cut(x, p).clone() for key, x in wholes.items()}
        if p.dtype in HALF:
            stored[master] = cut(_pop(left, f"{name}/master", p), p)
    groups = inner.state_dict()["param_groups"]
    for i, group in enumerate(groups):
        counters = {key: _pop(left, f"group/{i}/{key}", None).item() for key in COUNTERS if key in group}
        group |= {key: int(value) if key == "step" else value for key, value in counters.items()}
    if left:
        raise ValueError(f"the optimiser state is of another model or optimiser: it has {next(iter(left))!r}")
    stepped = chain.from_iterable(group["params"] for group in inner.param_groups)
    state = {i: states[master] for i, master in enumerate(stepped) if master in states}
    inner.load_state_dict({"state": state, "param_groups": groups})
    for master, value in stored.items():
        master.copy_(value)
    optimizer.round()


def _names(optimizer: MixedOptimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[Tensor, str]:
    by_parameter: dict[Tensor, str] = {p: name for name, p in named_parameters}
    return {p: by_parameter[p] for p in optimizer.masters}


def _pop(tensors: dict[str, Tensor], name: str, like: Tensor | None) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ValueError(f"the optimiser state is of another model or optimiser: it has no {name!r}")
    shape = [] if like is None else list(like.shape)
    if list(tensor.shape) != shape:
        raise ValueError(f"the optimiser state is of another model: {name!r} is {list(tensor.shape)}, not {shape}")
    return tensor
