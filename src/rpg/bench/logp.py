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
from ..kernels.head_with_loss import COLUMNS as WORDS
from ..kernels.head_with_loss import GradientOf, head_with_loss
from ..loss.methods import algorithm
from ..models.blocks import Block, cut, gradients
from .synthetic import Sizes
from .table import Quantity, Section, Target, ratio
from .timing import Numbers, SideFailed, Watch, fresh, peak_gib, recorder, timed

OVER_LIGER = 6.0  # times faster
OVER_PRODUCTS, WITHIN_GIB = 1.3, 2.0  # of the head together with the loss: times their time, memory in all
BLOCK_ROWS, SUM_ROWS = 1024, 1664  # tokens of its blocks: with the head's gradient in bfloat16, and in float32
CHECKED = 512  # tokens whose errors are measured
BLOCK = 128  # tokens of the float64 reference at once
SEQUENCES = 32  # of the batch, where a loss is part of it
TOGETHER, SUMS = "rpg head with loss", "rpg head with loss, float32 sum"
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
Learned = tuple[Tensor, Tensor | None, Tensor, Tensor]  # logp, entropy, the gradients of the states and of the head
Learning = Callable[[HeadInputs], Learned]
Prepared = tuple[Callable[[], object], Learning | None]  # forward and backward; None: it gives no log-probabilities


def logp_section(sizes: Sizes, ceilings: Ceilings, watch: Watch) -> Section:
    checked = min(CHECKED, sizes.tokens)
    about = (
        f"{sizes.tokens:,} tokens, hidden size {sizes.hidden:,}, vocabulary {sizes.vocab:,}, {sizes.dtype}, forward "
        f"and backward, medians of {sizes.repeats} after one to warm up. Errors are those of {checked} other "
        "tokens against float64. With loss: DAPO's, the gradient added up over blocks of tokens, in the head's type "
        "or in float32, as rpg train has it, which is twice the bytes. Liger and cut-cross-entropy give no entropy; "
        "Liger computes its whole GRPO loss, one sequence at a time, which is its default; cut-cross-entropy leaves "
        "small gradients out, likewise."
    )
    section = Section("logp", "Log-probabilities from the head", COLUMNS, about)
    record = recorder(section, sizes, watch)
    inputs = make_inputs(sizes.tokens, sizes.hidden, sizes.vocab, sizes)
    floor = 1000 * ceilings.seconds(logp_flops(sizes.tokens, sizes.hidden, sizes.vocab))

    def measure(prepare: Callable[[HeadInputs, Sizes], Prepared]) -> Numbers:
        run, learning = prepare(inputs, sizes)
        milliseconds = 1000 * timed(run, sizes.device, sizes.repeats)
        numbers = {"ms": milliseconds, "peak GiB": peak_gib(sizes.device), "floor ms": floor}
        numbers["× floor"] = milliseconds / floor
        if products := section.value(BARE, "ms"):
            numbers["× products"] = milliseconds / products
        clear(inputs)
        fresh(sizes.device)
        return numbers | (errors(learning, sizes) if learning else {})

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
    section.require(
        TOGETHER,
        Target(f"≤ {OVER_PRODUCTS}× products", section.value(TOGETHER, "× products"), most=OVER_PRODUCTS),
        Target(f"≤ {WITHIN_GIB:.0f} GiB", section.value(TOGETHER, "peak GiB"), most=WITHIN_GIB),
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


def both_ways(scoring: Scoring, inputs: HeadInputs) -> Learned:
    clear(inputs)
    logp_N, entropy_N = scoring(inputs.hidden_NH, inputs.weight_VH, inputs.target_N)
    logp_N.backward(inputs.upstream_N.to(logp_N.dtype))  # type: ignore[no-untyped-call]
    assert inputs.hidden_NH.grad is not None
    assert inputs.weight_VH.grad is not None
    return logp_N.detach(), entropy_N, inputs.hidden_NH.grad, inputs.weight_VH.grad


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

    return _ways(scoring, inputs)


def _ways(scoring: Scoring, inputs: HeadInputs) -> Prepared:
    return partial(both_ways, scoring, inputs), partial(both_ways, scoring)


def with_loss(inputs: HeadInputs, sizes: Sizes, rows: int, in_float32: bool, words: int = WORDS) -> Prepared:
    """What rpg train does on a GPU: the head and a policy loss, blocks of so many tokens one after the other."""
    loss, count = algorithm("dapo").loss, min(SEQUENCES, sizes.tokens)
    mask_BT = torch.ones(count, sizes.tokens // count, dtype=torch.bool, device=sizes.device)
    place_N = torch.arange(mask_BT.numel(), device=sizes.device)
    blocks = cut([mask_BT.shape[1]] * count, rows, whole=False) or []
    with torch.no_grad():  # of a policy that is a little behind
        old_BT = linear_logp(inputs.hidden_NH, inputs.weight_VH, inputs.target_N)[0].view(mask_BT.shape) + 0.01
    advantage_B = torch.randn(count, device=sizes.device)

    def loss_of(block: Block, logp_BT: Tensor, entropy_BT: Tensor, here_BT: Tensor) -> Tensor:
        given = old_BT[block.rows], advantage_B[block.rows], here_BT
        return loss(logp_BT, *given, denominator=float(mask_BT.numel()), entropy=entropy_BT).loss

    def gradient_of(i: int, logp_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradients(blocks[i], loss_of, logp_N, entropy_N, place_N, mask_BT, entropy=False)

    tokens = [block.tokens for block in blocks]
    run = partial(_blocks_both_ways, inputs, tokens, gradient_of, in_float32, words)
    return run, partial(in_blocks, count=len(blocks), in_float32=in_float32)


def in_blocks(inputs: HeadInputs, count: int, in_float32: bool) -> Learned:
    """In so many blocks, with the gradient that is given: roundings add up as they do in a run."""
    step = -(-len(inputs.target_N) // count)
    tokens = [slice(first, first + step) for first in range(0, len(inputs.target_N), step)]
    return _blocks_both_ways(inputs, tokens, lambda i, *_: (inputs.upstream_N[tokens[i]], None), in_float32)


def _blocks_both_ways(
    inputs: HeadInputs, tokens: list[slice], gradient_of: GradientOf, in_float32: bool, words: int = WORDS
) -> Learned:
    states, head = inputs.hidden_NH.detach(), inputs.weight_VH.detach()
    total_VH = torch.zeros_like(head, dtype=torch.float32 if in_float32 else None)
    return *head_with_loss(states, head, inputs.target_N, tokens, gradient_of, total_VH, columns=words), total_VH


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

    return _ways(scoring, inputs)


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
    OURS: lambda inputs, _: _ways(linear_logp, inputs),
    TOGETHER: partial(with_loss, rows=BLOCK_ROWS, in_float32=False),
    SUMS: partial(with_loss, rows=SUM_ROWS, in_float32=True),
    TORCH: lambda inputs, _: _ways(plain, inputs),
    "TRL's fused head": trl_head,
    LIGER: liger,
    "cut-cross-entropy": cut_cross_entropy,
}


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors(learning: Learning, sizes: Sizes) -> Numbers:
    inputs = make_inputs(min(CHECKED, sizes.tokens), sizes.hidden, sizes.vocab, sizes, seed=1)
    logp_N, entropy_N, *found = learning(inputs)
    exact_logp_N, exact_entropy_N, *true = exact(inputs)
    numbers = {"logp error": float((logp_N.detach().double() - exact_logp_N).abs().max())}
    if entropy_N is not None:
        numbers["entropy error"] = float((entropy_N.detach().double() - exact_entropy_N).abs().max())
    for name, one, gradient in zip(("d states error", "d head error"), found, true, strict=True):
        numbers[name] = float((one.double() - gradient).norm() / gradient.norm())
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
