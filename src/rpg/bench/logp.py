"""Log-probability from hidden states and the head, forward and backward: seconds, memory and error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..costs.operations import Ceilings, logp_flops
from ..kernels import linear_logp
from .peers import PEERS
from .rows import Column, Row, Section, Target, ratio
from .sizes import Sizes
from .timing import fresh, guarded, peak_gib, timed

OVER_LIGER = 6.0  # times faster
CHECKED = 512  # tokens whose errors are measured
BLOCK = 128  # tokens of the float64 reference at once
COLUMNS = (
    Column("ms", "forward and backward, for the states and the head", ".1f"),
    Column("peak GiB", "of device memory, with the states, the head and their gradients", ".2f"),
    Column("floor ms", "six operations for each token, state and word, over the measured matrix rate", ".1f"),
    Column("× floor", "ms over that", ".2f"),
    Column("× products", "ms over three bare products of the same shapes", ".2f"),
    Column("logp error", "largest, against float64", ".1e"),
    Column("entropy error", "largest, against float64", ".1e"),
    Column("d states error", "of the gradient, relative to its norm, against float64", ".1e"),
    Column("d head error", "likewise", ".1e"),
)
Scoring = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]  # states, head, targets -> logp, entropy


@dataclass(frozen=True)
class Problem:
    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    upstream_N: Tensor  # the gradient that reaches logp


def make_problem(tokens: int, hidden: int, vocab: int, sizes: Sizes, seed: int = 0) -> Problem:
    """States of a size at which predictions are neither flat nor certain."""
    generator = torch.Generator(sizes.device).manual_seed(seed)
    like: dict[str, Any] = {"device": sizes.device, "generator": generator}
    dtype = getattr(torch, sizes.dtype)
    return Problem(
        torch.randn(tokens, hidden, **like).to(dtype).requires_grad_(),
        (torch.randn(vocab, hidden, **like) * 2 / hidden**0.5).to(dtype).requires_grad_(),
        torch.randint(vocab, (tokens,), **like),
        torch.randn(tokens, **like) / tokens,
    )


def logp_section(sizes: Sizes, ceilings: Ceilings, watch: Callable[[str], None]) -> Section:
    section = Section("logp", "Log-probabilities from the head", COLUMNS, _about(sizes))
    problem = make_problem(sizes.tokens, sizes.hidden, sizes.vocab, sizes)
    floor = 1000 * ceilings.seconds(logp_flops(sizes.tokens, sizes.hidden, sizes.vocab))
    products: float | None = None

    def measure(name: str, run: Callable[[], object], scoring: Scoring | None) -> Row:
        milliseconds = 1000 * timed(run, sizes.device, sizes.repeats)
        found = {"ms": milliseconds, "peak GiB": peak_gib(sizes.device), "floor ms": floor}
        found |= {"× floor": milliseconds / floor, **({"× products": milliseconds / products} if products else {})}
        clear(problem)
        fresh(sizes.device)
        return Row(name, found | (errors(scoring, sizes) if scoring else {}))

    def add(name: str, run: Callable[[], object], scoring: Scoring | None) -> None:
        watch(f"logp: {name}")
        section.rows.append(guarded(name, sizes.device, lambda: measure(name, run, scoring)))
        clear(problem)

    bare = "three bare products"
    add(bare, lambda: three_products(problem), None)
    products = section.value(bare, "ms")
    own: dict[str, Scoring] = {"rpg linear_logp": linear_logp, "torch, float32 logits": plain}
    for name, scoring in own.items():
        add(name, partial(both_ways, scoring, problem), scoring)
    for name, make in PEERS.items():
        watch(f"logp: {name}")
        try:
            peer = make(problem, sizes)
        except Exception as error:  # not installed, or not for this device
            section.rows.append(Row(name, error=str(error)))
            continue
        add(name, peer.run, peer.scoring)
    if sizes.device != "cpu":
        _set_targets(section)
    return section


def _set_targets(section: Section) -> None:
    mine, torch_, liger = "rpg linear_logp", "torch, float32 logits", "Liger GRPO loss"
    found = section.value(mine, "ms"), section.value(mine, "peak GiB")
    targets = (
        Target("≤ 1× torch's time", ratio(found[0], section.value(torch_, "ms")), most=1.0),
        Target(f"≥ {OVER_LIGER:.0f}× Liger", ratio(section.value(liger, "ms"), found[0]), least=OVER_LIGER),
        Target("≤ 1× Liger's memory", ratio(found[1], section.value(liger, "peak GiB")), most=1.0),
    )
    section.rows[:] = [replace(row, targets=targets) if row.name == mine else row for row in section.rows]


def _about(sizes: Sizes) -> str:
    return (
        f"{sizes.tokens:,} tokens, hidden size {sizes.hidden:,}, vocabulary {sizes.vocab:,}, {sizes.dtype}, forward "
        f"and backward, medians of {sizes.repeats} after one to warm up. Errors are those of {_checked(sizes)} other "
        "tokens against float64. Liger and cut-cross-entropy give no entropy; Liger computes its whole GRPO loss, one "
        "sequence at a time, which is its default; cut-cross-entropy leaves small gradients out, likewise."
    )


def _checked(sizes: Sizes) -> int:
    return min(CHECKED, sizes.tokens)


def plain(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """What everybody writes first."""
    logp_NV = (hidden_NH @ weight_VH.T).float().log_softmax(-1)
    entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    return logp_NV.gather(-1, target_N[:, None])[:, 0], entropy_N


def both_ways(scoring: Scoring, problem: Problem) -> None:
    clear(problem)
    logp_N, _ = scoring(problem.hidden_NH, problem.weight_VH, problem.target_N)
    logp_N.backward(problem.upstream_N.to(logp_N.dtype))  # type: ignore[no-untyped-call]


def clear(problem: Problem) -> None:
    problem.hidden_NH.grad = problem.weight_VH.grad = None


@torch.no_grad()
def three_products(problem: Problem) -> None:
    logits_NV = problem.hidden_NH @ problem.weight_VH.T
    problem.hidden_NH.grad = logits_NV @ problem.weight_VH
    problem.weight_VH.grad = logits_NV.T @ problem.hidden_NH


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors(scoring: Scoring, sizes: Sizes) -> dict[str, float]:
    problem = make_problem(_checked(sizes), sizes.hidden, sizes.vocab, sizes, seed=1)
    logp_N, entropy_N = scoring(problem.hidden_NH, problem.weight_VH, problem.target_N)
    logp_N.backward(problem.upstream_N.to(logp_N.dtype))  # type: ignore[no-untyped-call]
    exact_logp_N, exact_entropy_N, states_NH, head_VH = exact(problem)
    found = {"logp error": float((logp_N.detach().double() - exact_logp_N).abs().max())}
    if entropy_N is not None:
        found["entropy error"] = float((entropy_N.detach().double() - exact_entropy_N).abs().max())
    for name, tensor, right in (
        ("d states error", problem.hidden_NH, states_NH),
        ("d head error", problem.weight_VH, head_VH),
    ):
        assert tensor.grad is not None
        found[name] = float((tensor.grad.double() - right).norm() / right.norm())
    return found


@torch.no_grad()
def exact(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, a block of tokens at a time: logp, entropy, and the gradients of the states and of the head."""
    weight_VH = problem.weight_VH.double()
    head_VH = torch.zeros_like(weight_VH)
    logps, entropies, states = [], [], []
    for begin in range(0, len(problem.target_N), BLOCK):
        part = slice(begin, begin + BLOCK)
        hidden_NH, target_N1 = problem.hidden_NH[part].double(), problem.target_N[part, None]
        logp_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
        logps.append(logp_NV.gather(-1, target_N1)[:, 0])
        entropies.append(-(logp_NV.exp() * logp_NV).sum(-1))
        upstream_N1 = problem.upstream_N[part, None].double()
        slope_NV = -logp_NV.exp() * upstream_N1
        slope_NV.scatter_add_(-1, target_N1, upstream_N1)
        states.append(slope_NV @ weight_VH)
        head_VH += slope_NV.T @ hidden_NH
    return torch.cat(logps), torch.cat(entropies), torch.cat(states), head_VH
