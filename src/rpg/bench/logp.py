"""Log-probability from hidden states and the head, forward and backward: ours, the bare products and the peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..costs.operations import Ceilings, logp_flops
from ..kernels import linear_logp
from .synthetic import Sizes
from .table import Quantity, Section, Target, ratio
from .timing import Numbers, SideFailed, Watch, fresh, peak_gib, recorder, timed

OVER_LIGER = 6.0  # times faster
CHECKED = 512  # tokens whose errors are measured
BLOCK = 128  # tokens of the float64 reference at once
SEQUENCES = 32  # of Liger's batch
BARE, OURS, TORCH, LIGER = "three bare products", "rpg linear_logp", "torch, float32 logits", "Liger GRPO loss"
COLUMNS = (
    Quantity("ms", "forward and backward, for the states and the head", ".1f"),
    Quantity("peak GiB", "of device memory, with the states, the head and their gradients", ".2f"),
    Quantity("floor ms", "six operations for each token, state and word, over the measured matrix rate", ".1f"),
    Quantity("× floor", "ms over that", ".2f"),
    Quantity("× products", "ms over three bare products of the same shapes", ".2f"),
    Quantity("logp error", "largest, against float64", ".1e"),
    Quantity("entropy error", "largest, against float64", ".1e"),
    Quantity("d states error", "of the gradient, relative to its norm, against float64", ".1e"),
    Quantity("d head error", "likewise", ".1e"),
)


@dataclass(frozen=True)
class HeadInputs:
    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    upstream_N: Tensor  # the gradient that reaches logp


Scoring = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]  # states, head, targets -> logp, entropy
Prepared = tuple[Callable[[], object], Scoring | None]  # forward and backward; None: it gives no log-probabilities


def logp_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    checked = min(CHECKED, sizes.tokens)
    about = (
        f"{sizes.tokens:,} tokens, hidden size {sizes.hidden:,}, vocabulary {sizes.vocab:,}, {sizes.dtype}, forward "
        f"and backward, medians of {sizes.repeats} after one to warm up. Errors are those of {checked} other "
        "tokens against float64. Liger and cut-cross-entropy give no entropy; Liger computes its whole GRPO loss, one "
        "sequence at a time, which is its default; cut-cross-entropy leaves small gradients out, likewise."
    )
    section = Section("logp", "Log-probabilities from the head", COLUMNS, about)
    record = recorder(section, sizes, watch)
    inputs = make_inputs(sizes.tokens, sizes.hidden, sizes.vocab, sizes)
    floor = 1000 * ceilings.seconds(logp_flops(sizes.tokens, sizes.hidden, sizes.vocab))

    def measure(prepare: Callable[[HeadInputs, Sizes], Prepared]) -> Numbers:
        run, scoring = prepare(inputs, sizes)
        milliseconds = 1000 * timed(run, sizes.device, sizes.repeats)
        numbers = {"ms": milliseconds, "peak GiB": peak_gib(sizes.device), "floor ms": floor}
        numbers["× floor"] = milliseconds / floor
        if products := section.value(BARE, "ms"):
            numbers["× products"] = milliseconds / products
        clear(inputs)
        fresh(sizes.device)
        return numbers | (errors(scoring, sizes) if scoring else {})

    for name, prepare in HEADS.items():
        record(name, partial(measure, prepare))
        clear(inputs)
    if sizes.device != "cpu":
        set_targets(section)
    return section


def set_targets(section: Section) -> None:
    ms, memory = section.value(OURS, "ms"), section.value(OURS, "peak GiB")
    section.require(
        OURS,
        Target("≤ 1× torch's time", ratio(ms, section.value(TORCH, "ms")), most=1.0),
        Target(f"≥ {OVER_LIGER:.0f}× Liger", ratio(section.value(LIGER, "ms"), ms), least=OVER_LIGER),
        Target("≤ 1× Liger's memory", ratio(memory, section.value(LIGER, "peak GiB")), most=1.0),
    )


def make_inputs(tokens: int, hidden: int, vocab: int, sizes: Sizes, seed: int = 0) -> HeadInputs:
    """States of a size at which predictions are neither flat nor certain."""
    generator = torch.Generator(sizes.device).manual_seed(seed)
    like: dict[str, Any] = {"device": sizes.device, "generator": generator}
    dtype = getattr(torch, sizes.dtype)
    return HeadInputs(
        torch.randn(tokens, hidden, **like).to(dtype).requires_grad_(),
        (torch.randn(vocab, hidden, **like) * 2 / hidden**0.5).to(dtype).requires_grad_(),
        torch.randint(vocab, (tokens,), **like),
        torch.randn(tokens, **like) / tokens,
    )


def clear(inputs: HeadInputs) -> None:
    inputs.hidden_NH.grad = inputs.weight_VH.grad = None


def both_ways(scoring: Scoring, inputs: HeadInputs) -> tuple[Tensor, Tensor | None]:
    clear(inputs)
    logp_N, entropy_N = scoring(inputs.hidden_NH, inputs.weight_VH, inputs.target_N)
    logp_N.backward(inputs.upstream_N.to(logp_N.dtype))  # type: ignore[no-untyped-call]
    return logp_N, entropy_N


# ---- the heads -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def three_products(inputs: HeadInputs) -> None:
    logits_NV = inputs.hidden_NH @ inputs.weight_VH.T
    inputs.hidden_NH.grad = logits_NV @ inputs.weight_VH
    inputs.weight_VH.grad = logits_NV.T @ inputs.hidden_NH


def plain(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """What everybody writes first."""
    logp_NV = (hidden_NH @ weight_VH.T).float().log_softmax(-1)
    entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    return logp_NV.gather(-1, target_N[:, None])[:, 0], entropy_N


def trl_head(inputs: HeadInputs, sizes: Sizes) -> Prepared:
    """The head that TRL's GRPOTrainer puts into a model: log-probabilities and entropies, without logits."""
    module = _installed("trl.trainer.utils")
    function, chunk = module._ChunkedLogProbFunction, module._CHUNKED_LOGPROB_CHUNK_SIZE

    def scoring(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
        logp_N, entropy_N, *_ = function.apply(
            hidden_NH, weight_VH, None, target_N, 1.0, chunk, None, 1.0, ("log_probs", "entropy")
        )
        return logp_N, entropy_N

    return partial(both_ways, scoring, inputs), scoring


def liger(inputs: HeadInputs, sizes: Sizes) -> Prepared:
    """LigerFusedLinearGRPOLoss with its defaults, without a reference: the old policy is the present one."""
    loss = _installed("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    _gpu_only(sizes)
    rows = min(SEQUENCES, sizes.tokens)
    shape = rows, sizes.tokens // rows
    mask_BT = torch.ones(shape, device=sizes.device)
    advantage_B = torch.randn(rows, device=sizes.device)

    def run() -> None:
        clear(inputs)
        hidden_BTH = inputs.hidden_NH.view(*shape, -1)
        value, _ = loss(hidden_BTH, inputs.weight_VH, inputs.target_N.view(shape), mask_BT, advantage_B)
        value.backward()

    return run, None


def cut_cross_entropy(inputs: HeadInputs, sizes: Sizes) -> Prepared:
    function = _installed("cut_cross_entropy").linear_cross_entropy
    _gpu_only(sizes)

    def scoring(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
        return -function(hidden_NH, weight_VH, target_N, reduction="none"), None

    return partial(both_ways, scoring, inputs), scoring


def _installed(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise SideFailed("not installed") from error


def _gpu_only(sizes: Sizes) -> None:
    if sizes.device == "cpu":
        raise SideFailed("it needs a GPU")


HEADS: dict[str, Callable[[HeadInputs, Sizes], Prepared]] = {
    BARE: lambda inputs, _: (partial(three_products, inputs), None),
    OURS: lambda inputs, _: (partial(both_ways, linear_logp, inputs), linear_logp),
    TORCH: lambda inputs, _: (partial(both_ways, plain, inputs), plain),
    "TRL's fused head": trl_head,
    LIGER: liger,
    "cut-cross-entropy": cut_cross_entropy,
}


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors(scoring: Scoring, sizes: Sizes) -> Numbers:
    inputs = make_inputs(min(CHECKED, sizes.tokens), sizes.hidden, sizes.vocab, sizes, seed=1)
    logp_N, entropy_N = both_ways(scoring, inputs)
    exact_logp_N, exact_entropy_N, *gradients = exact(inputs)
    numbers = {"logp error": float((logp_N.detach().double() - exact_logp_N).abs().max())}
    if entropy_N is not None:
        numbers["entropy error"] = float((entropy_N.detach().double() - exact_entropy_N).abs().max())
    tensors = {"d states error": inputs.hidden_NH, "d head error": inputs.weight_VH}
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert tensor.grad is not None
        numbers[name] = float((tensor.grad.double() - gradient).norm() / gradient.norm())
    return numbers


@torch.no_grad()
def exact(inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64, a block of tokens at a time: logp, entropy, and the gradients of the states and of the head."""
    weight_VH = inputs.weight_VH.double()
    head_VH = torch.zeros_like(weight_VH)
    logps, entropies, states = [], [], []
    for begin in range(0, len(inputs.target_N), BLOCK):
        block = slice(begin, begin + BLOCK)
        hidden_NH, target_N1 = inputs.hidden_NH[block].double(), inputs.target_N[block, None]
        logp_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
        logps.append(logp_NV.gather(-1, target_N1)[:, 0])
        entropies.append(-(logp_NV.exp() * logp_NV).sum(-1))
        upstream_N1 = inputs.upstream_N[block, None].double()
        slope_NV = -logp_NV.exp() * upstream_N1
        slope_NV.scatter_add_(-1, target_N1, upstream_N1)
        states.append(slope_NV @ weight_VH)
        head_VH += slope_NV.T @ hidden_NH
    return torch.cat(logps), torch.cat(entropies), torch.cat(states), head_VH
