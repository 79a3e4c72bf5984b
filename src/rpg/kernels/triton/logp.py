# mypy: ignore-errors
"""logp_torch in Triton, one pass over a chunk each; a program takes a token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import logp_torch
from ..logp_torch import Slope

BLOCK = 4096  # logits of a row at once, at most
WARPS = 4


@triton.jit(do_not_specialize=["first"])
def _observe(
    logits, ref, target, sums, logits_row, sums_row, width, first, scale, KL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    ref += row * logits_row
    sums += row
    top, total, lean = tl.load(sums), tl.load(sums + sums_row), tl.load(sums + 2 * sums_row)
    if KL:
        ref_top, ref_total, gap = (
            tl.load(sums + 4 * sums_row),
            tl.load(sums + 5 * sums_row),
            tl.load(sums + 6 * sums_row),
        )
    place = tl.load(target + row) - first
    if (place >= 0) & (place < width):
        tl.store(sums + 3 * sums_row, tl.load(logits + place) * scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits + column, mask=inside, other=-float("inf")) * scale
        new = tl.maximum(top, tl.max(z, 0))
        drop = top - new
        fade = tl.exp(drop)
        e = tl.exp(z - new)
        lean = (lean + total * drop) * fade + tl.sum(tl.where(inside, e * (z - new), 0.0), 0)
        total = total * fade + tl.sum(e, 0)
        top = new
        if KL:
            z_ref = tl.load(ref + column, mask=inside, other=-float("inf")) * scale
            gap = gap * fade + tl.sum(tl.where(inside, e * (z - z_ref), 0.0), 0)
            ref_new = tl.maximum(ref_top, tl.max(z_ref, 0))
            ref_total = ref_total * tl.exp(ref_top - ref_new) + tl.sum(tl.exp(z_ref - ref_new), 0)
            ref_top = ref_new
    tl.store(sums, top)
    tl.store(sums + sums_row, total)
    tl.store(sums + 2 * sums_row, lean)
    if KL:
        tl.store(sums + 4 * sums_row, ref_top)
        tl.store(sums + 5 * sums_row, ref_total)
        tl.store(sums + 6 * sums_row, gap)


@triton.jit(do_not_specialize=["first"])
def _slope(
    logits,
    ref,
    out,
    target,
    norm,
    entropy,
    d_logp,
    d_entropy,
    ref_norm,
    kl,
    d_kl,
    logits_row,
    out_row,
    width,
    first,
    scale,
    ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    ref += row * logits_row
    out += row * out_row
    normaliser, up_logp = tl.load(norm + row), tl.load(d_logp + row)
    place = tl.load(target + row) - first
    if ENTROPY:
        value, up_entropy = tl.load(entropy + row), tl.load(d_entropy + row)
    if KL:
        ref_normaliser, divergence, up_kl = tl.load(ref_norm + row), tl.load(kl + row), tl.load(d_kl + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        logp = tl.load(logits + column, mask=inside, other=0.0) * scale - normaliser
        tl.debug_barrier()  # out lies on the front of the same row: all have read before any writes
        pull = up_logp
        if ENTROPY:
            pull += up_entropy * (logp + value)
        if KL:
            logq = tl.load(ref + column, mask=inside, other=0.0) * scale - ref_normaliser
            pull -= up_kl * (logp - logq - divergence)
        d = tl.where(column == place, up_logp, 0.0) - tl.exp(logp) * pull
        tl.store(out + column, (d * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _observe_powers(
    logits, powers, target, sums, tops, logits_row, powers_row, sums_row, width, first, scale, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    powers += row * powers_row
    sums += row
    tops += row + (first // WIDTH).to(tl.int64) * sums_row
    top, total, lean = tl.load(sums), tl.load(sums + sums_row), tl.load(sums + 2 * sums_row)
    place = tl.load(target + row) - first
    if (place >= 0) & (place < width):
        tl.store(sums + 3 * sums_row, tl.load(logits + place) * scale)
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < width
        z = tl.load(logits + column, mask=inside, other=-float("inf")) * scale
        new = tl.maximum(top, tl.max(z, 0))
        drop = top - new
        fade = tl.exp(drop)
        e = tl.exp(z - new)
        lean = (lean + total * drop) * fade + tl.sum(tl.where(inside, e * (z - new), 0.0), 0)
        total = total * fade + tl.sum(e, 0)
        top = new
        tl.store(powers + column, e.to(powers.dtype.element_ty), mask=inside)
        tl.store(tops, top)
        tops += sums_row
    tl.store(sums, top)
    tl.store(sums + sums_row, total)
    tl.store(sums + 2 * sums_row, lean)


@triton.jit
def _slope_of_powers(
    powers,
    tops,
    target,
    logp,
    norm,
    entropy,
    d_logp,
    d_entropy,
    powers_row,
    tops_row,
    width,
    scale,
    ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    powers += row * powers_row
    tops += row
    normaliser, up_logp, of_target = tl.load(norm + row), tl.load(d_logp + row), tl.load(logp + row)
    place = tl.load(target + row)
    pull_there = up_logp
    if ENTROPY:
        value, up_entropy = tl.load(entropy + row), tl.load(d_entropy + row)
        pull_there += up_entropy * (of_target + value)
    there = up_logp - tl.exp(of_target) * pull_there
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < width
        e = tl.load(powers + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(tops) - normaliser
        pull = up_logp
        if ENTROPY:
            pull += up_entropy * (tl.log(tl.where(e > 0, e, 1.0)) + share + value)
        d = tl.where(column == place, there, -(e * tl.exp(share)) * pull)
        tl.store(powers + column, (d * scale).to(powers.dtype.element_ty), mask=inside)
        tops += tops_row


def observe(sums: Tensor, logits_NC: Tensor, ref_NC: Tensor | None, target_N: Tensor, first: int, scale: float) -> None:
    rows, width = logits_NC.shape
    with torch.cuda.device_of(logits_NC):  # Triton launches on the current device
        _observe[(rows,)](
            logits_NC,
            logits_NC if ref_NC is None else ref_NC,
            target_N,
            sums,
            logits_NC.stride(0),
            sums.stride(0),
            width,
            first,
            scale,
            KL=ref_NC is not None,
            BLOCK=_block(width),
            num_warps=WARPS,
        )


def slope(
    by: Slope, logits_NC: Tensor, ref_NC: Tensor | None, target_N: Tensor, first: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """The gradient lies where the logits were: in float32 each in its place, in a half type in a row's first half."""
    rows, width = logits_NC.shape
    out_NC = logits_NC.view(dtype)[:, :width]
    absent = by.norm_N
    with torch.cuda.device_of(logits_NC):  # Triton launches on the current device
        _slope[(rows,)](
            logits_NC,
            logits_NC if ref_NC is None else ref_NC,
            out_NC,
            target_N,
            by.norm_N,
            by.entropy_N,
            by.d_logp_N,
            absent if by.d_entropy_N is None else by.d_entropy_N,
            absent if by.ref_norm_N is None else by.ref_norm_N,
            absent if by.kl_N is None else by.kl_N,
            absent if by.d_kl_N is None else by.d_kl_N,
            logits_NC.stride(0),
            out_NC.stride(0),
            width,
            first,
            scale,
            ENTROPY=by.d_entropy_N is not None,
            KL=ref_NC is not None,
            BLOCK=_block(width),
            num_warps=WARPS,
        )
    return out_NC


def observe_powers(
    sums: Tensor, top_WN: Tensor, power_NC: Tensor, logits_NC: Tensor, target_N: Tensor, first: int, scale: float
) -> None:
    rows, width = logits_NC.shape
    assert top_WN.stride(0) == sums.stride(0)
    with torch.cuda.device_of(logits_NC):
        _observe_powers[(rows,)](
            logits_NC,
            power_NC,
            target_N,
            sums,
            top_WN,
            logits_NC.stride(0),
            power_NC.stride(0),
            sums.stride(0),
            width,
            first,
            scale,
            WIDTH=logp_torch.WIDTH,
            num_warps=WARPS,
        )


def slope_of_powers(
    by: Slope, top_WN: Tensor, power_NV: Tensor, logp_N: Tensor, target_N: Tensor, scale: float
) -> Tensor:
    rows, width = power_NV.shape
    absent = by.norm_N
    with torch.cuda.device_of(power_NV):
        _slope_of_powers[(rows,)](
            power_NV,
            top_WN,
            target_N,
            logp_N,
            by.norm_N,
            by.entropy_N,
            by.d_logp_N,
            absent if by.d_entropy_N is None else by.d_entropy_N,
            power_NV.stride(0),
            top_WN.stride(0),
            width,
            scale,
            ENTROPY=by.d_entropy_N is not None,
            WIDTH=logp_torch.WIDTH,
            num_warps=WARPS,
        )
    return power_NV


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))
