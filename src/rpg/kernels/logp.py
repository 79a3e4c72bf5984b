"""Log-probability, entropy and exact KL from hidden states and the head; [tokens, vocabulary] is never held whole.

``reference`` is what is computed. ``_Chunked`` computes it a chunk of the vocabulary at a time, all tokens at once: the
forward keeps running sums for each token, the backward computes each chunk's logits again, and a chunk of the weight's
gradient is complete when it is written. On CUDA what happens to a chunk is one pass of a Triton kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import logp_torch
from .kept import Gathered, Kept, KeptColumns
from .logp_torch import Slope

CHUNK = {"cuda": (2**14, 13 * 2**24), "cpu": (2**10, 2**22)}  # tokens at once, and bytes of their logits
WHOLE_ELEMENTS = 2**25  # on a CPU, up to here the logits are kept and nothing is computed twice
LOWEST = -1e38  # the maximum of nothing: finite, so that differences from it are


def linear_logp(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float = 1.0, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(h·Wᵀ/τ) at the targets, and the entropy of that distribution, [N] each in float32, with gradients.

    With ``kept`` the softmax is over each state's kept set, and over no other token.
    """
    logp_N, entropy_N, _ = _run(hidden_NH, weight_VH, target_N, None, temperature, kept)
    return logp_N, entropy_N


def linear_logp_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    ref_hidden_NH: Tensor,
    ref_weight_VH: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also KL(policy ‖ reference) over the whole vocabulary, [N]; no gradient reaches the reference."""
    ref = (ref_hidden_NH.detach(), ref_weight_VH.detach())
    logp_N, entropy_N, kl_N = _run(hidden_NH, weight_VH, target_N, ref, temperature)
    assert kl_N is not None
    return logp_N, entropy_N, kl_N


def head_logits(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """h·Wᵀ in float32; half types are multiplied without rounding the sums, where the device can."""
    differentiated = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    if hidden_NH.dtype in (torch.float16, torch.bfloat16) and not differentiated:
        out_NV = torch.empty(len(hidden_NH), len(weight_VH), dtype=torch.float32, device=hidden_NH.device)
        _product(hidden_NH, weight_VH.T, out_NV)
        return out_NV
    return (hidden_NH @ weight_VH.T).float()


def reference(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    ref: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The definition, with all logits in memory; ``ref`` are the hidden states and the weight of the reference."""
    logp_N, entropy_N, logp_NV = softmax_logp(_float(hidden_NH @ weight_VH.T) / temperature, target_N, kept)
    if ref is None:
        return logp_N, entropy_N, None
    ref_NV = (_float(ref[0] @ ref[1].T) / temperature).log_softmax(-1)
    return logp_N, entropy_N, (logp_NV.exp() * (logp_NV - ref_NV)).sum(-1)


def softmax_logp(z_NV: Tensor, target_N: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole rows of logits: log-probabilities of the targets, entropies, log-probabilities of all."""
    outside_NV = None if kept is None else kept.outside(z_NV.shape[1])
    logp_NV = (z_NV if outside_NV is None else z_NV.masked_fill(outside_NV, -torch.inf)).log_softmax(-1)
    finite_NV = logp_NV if outside_NV is None else logp_NV.masked_fill(outside_NV, 0.0)
    logp_N = logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
    return logp_N, -(logp_NV.exp() * finite_NV).sum(-1), logp_NV


def _run(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    ref: tuple[Tensor, Tensor] | None,
    temperature: float,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
    kernels = _kernels(hidden_NH, weight_VH)
    if kernels is None:
        return reference(hidden_NH, weight_VH, target_N, ref, temperature, kept)
    if kept is not None and kept.few(len(weight_VH)):
        logp_N, entropy_N = Gathered.apply(hidden_NH, weight_VH, target_N, kept, temperature)  # type: ignore[no-untyped-call]
        return logp_N, entropy_N, None
    columns = None if kept is None else KeptColumns(kept, len(weight_VH))
    out: tuple[Tensor, Tensor, Tensor | None] = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, target_N.contiguous(), ref, temperature, kernels, columns
    )
    return out


def _kernels(hidden_NH: Tensor, weight_VH: Tensor) -> ModuleType | None:
    """Which implementation: Triton's, torch's, or, for little, the definition itself (None)."""
    size = len(hidden_NH) * len(weight_VH)
    if size == 0 or (not hidden_NH.is_cuda and size <= WHOLE_ELEMENTS):
        return None
    return fastest(hidden_NH)


def fastest(hidden_NH: Tensor) -> ModuleType:
    """The kernels: Triton's, or torch's."""
    triton = _triton() if hidden_NH.is_cuda and hidden_NH.dtype != torch.float64 else None
    return triton or logp_torch


@functools.cache
def _triton() -> ModuleType | None:
    try:
        from .triton import logp as logp_triton
    except ImportError:
        return None
    return logp_triton


Heads = list[tuple[Tensor, Tensor]]  # hidden states and weight of the policy, and of the reference where there is one


class _Chunked(torch.autograd.Function):
    """``kernels`` is logp_torch or logp_triton: ``observe`` and ``slope`` are what happens to a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        ref: tuple[Tensor, Tensor] | None,
        temperature: float,
        kernels: ModuleType,
        kept: KeptColumns | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        sums = _sums(_heads(hidden_NH, weight_VH, ref), target_N, temperature, kernels, kept)
        top_N, total_N, lean_N, picked_N, *of_ref = sums
        log_total_N = total_N.log()
        norm_N = top_N + log_total_N
        logp_N = picked_N - top_N - log_total_N
        entropy_N = log_total_N - lean_N / total_N
        ref_norm_N = kl_N = None
        if of_ref:
            ref_top_N, ref_total_N, gap_N = of_ref
            ref_norm_N = ref_top_N + ref_total_N.log()
            kl_N = gap_N / total_N - (norm_N - ref_norm_N)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, *(ref or ()), norm_N, entropy_N, ref_norm_N, kl_N)
        ctx.temperature, ctx.kernels, ctx.kept = temperature, kernels, kept
        return logp_N, entropy_N, kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_out: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, *ref, norm_N, entropy_N, ref_norm_N, kl_N = ctx.saved_tensors
        d_logp_N, d_entropy_N, d_kl_N = (None if d is None else d.contiguous() for d in d_out)
        if d_logp_N is None:
            d_logp_N = torch.zeros_like(norm_N)
        by = Slope(norm_N, entropy_N, d_logp_N, d_entropy_N, ref_norm_N, kl_N, d_kl_N)
        heads = _heads(hidden_NH, weight_VH, None if d_kl_N is None else ref)
        how = ctx.temperature, ctx.kernels, ctx.kept
        d_hidden_NH, d_weight_VH = _gradients(heads, target_N, by, *how, ctx.needs_input_grad)
        return d_hidden_NH, d_weight_VH, None, None, None, None, None


def _sums(
    heads: Heads, target_N: Tensor, temperature: float, kernels: ModuleType, kept: KeptColumns | None = None
) -> Tensor:
    """Of each token over the vocabulary, [4,N], with a reference [7,N]; z are the logits over τ, m their maximum:
    m,  Σ e^(z−m),  Σ e^(z−m)·(z−m),  z of the target,  m_ref,  Σ e^(z_ref−m_ref),  Σ e^(z−m)·(z−z_ref)."""
    sums = torch.zeros(7 if len(heads) > 1 else 4, len(target_N), dtype=_wide(heads), device=target_N.device)
    sums[0::4] = LOWEST
    for columns, tokens, logits in _chunks(heads, kept):
        kernels.observe(sums[:, tokens], *logits, target_N[tokens], columns.start, 1 / temperature)
    return sums


def _gradients(
    heads: Heads,
    target_N: Tensor,
    by: Slope,
    temperature: float,
    kernels: ModuleType,
    kept: KeptColumns | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """For the hidden states (summed in float32 over the vocabulary) and the weight (a chunk is written once)."""
    hidden_NH, weight_VH = heads[0]
    d_hidden_NH = torch.empty_like(hidden_NH, dtype=_wide(heads)) if needed[0] else None
    d_weight_VH = torch.empty_like(weight_VH) if needed[1] else None
    d_chunk = None  # a chunk of the weight's gradient, in float32 if it is a sum over blocks of tokens
    for columns, tokens, logits in _chunks(heads, kept):
        chunk = kernels.slope(by.of(tokens), *logits, target_N[tokens], columns.start, 1 / temperature, hidden_NH.dtype)
        if d_hidden_NH is not None:
            _product(chunk, weight_VH[columns], d_hidden_NH[tokens], add=columns.start > 0)
        if d_weight_VH is not None:
            if tokens.stop - tokens.start == len(hidden_NH):
                torch.mm(chunk.T, hidden_NH, out=d_weight_VH[columns])
                continue
            if tokens.start == 0:
                d_chunk = torch.empty_like(d_weight_VH[columns], dtype=_wide(heads))
            assert d_chunk is not None
            _product(chunk.T, hidden_NH[tokens], d_chunk, add=tokens.start > 0)
            if tokens.stop == len(hidden_NH):
                d_weight_VH[columns] = d_chunk
    del logits, chunk
    return None if d_hidden_NH is None else d_hidden_NH.to(hidden_NH.dtype), d_weight_VH


def _chunks(heads: Heads, kept: KeptColumns | None = None) -> Iterator[tuple[slice, slice, list[Tensor | None]]]:
    """KeptColumns of the vocabulary, tokens, and their logits (and the reference's); the next chunk overwrites them."""
    hidden_NH, weight_VH = heads[0]
    tokens, vocabulary = len(hidden_NH), len(weight_VH)
    most, size = CHUNK.get(hidden_NH.device.type, CHUNK["cpu"])
    rows, width = _tile(tokens, vocabulary, most, size // len(heads))
    buffers = [torch.empty(rows, width, dtype=_wide(heads), device=hidden_NH.device) for _ in heads]
    for first in range(0, vocabulary, width):
        columns = slice(first, min(first + width, vocabulary))
        for token in range(0, tokens, rows):
            block = slice(token, min(token + rows, tokens))
            logits: list[Tensor | None] = [None, None]
            for i, ((h_NH, w_VH), buffer) in enumerate(zip(heads, buffers, strict=True)):
                chunk_NC = buffer[: block.stop - block.start, : columns.stop - columns.start]
                _product(h_NH[block], w_VH[columns].T, chunk_NC)
                if kept is not None:
                    kept.hide(chunk_NC, columns, block)
                logits[i] = chunk_NC
            yield columns, block, logits


def _tile(tokens: int, vocabulary: int, most: int, size: int) -> tuple[int, int]:
    """Tokens and columns of a chunk: float32 logits of at most ``size`` bytes, blocks of tokens that differ little."""
    rows = -(-tokens // -(-tokens // most))
    width = size // (4 * rows)
    return rows, min(vocabulary, width - width % 128 if width > 128 else max(1, width))


def _product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a·b, or out += a·b; half types go into float32 unrounded, where torch can."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif not a.is_cuda or not hasattr(torch.ops.aten.mm, "dtype_out"):
        out.add_(a @ b) if add else out.copy_(a @ b)
    elif not add:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif _adds_into_float32(a.dtype, a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=out.dtype))


@functools.cache
def _adds_into_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether addmm takes a float32 sum of half products: the first versions with out_dtype do not."""
    a, total = torch.ones(8, 8, dtype=dtype, device=device), torch.ones(8, 8, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 9).all())


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _heads(hidden_NH: Tensor, weight_VH: Tensor, ref: Sequence[Tensor] | None) -> Heads:
    pairs = [(hidden_NH, weight_VH)] + ([] if ref is None else [(ref[0], ref[1])])
    return [(h_NH.detach().contiguous(), w_VH.detach()) for h_NH, w_VH in pairs]


def _wide(heads: Heads) -> torch.dtype:
    return torch.float64 if heads[0][0].dtype == torch.float64 else torch.float32
