# mypy: ignore-errors
"""Triton kernels behind `fused`: RMS norm, gated activation, rotary embedding; forward and backward.

A kernel computes in float32 and rounds where the eager code would: to the input's type after each operation that
would have written a tensor. Grids depend on shapes alone, nothing is read back: safe inside CUDA graphs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program of the gated activation
WAVES = 16  # programs a multiprocessor gets in the norm's backward, each with a row of partial sums

SILU, GELU_TANH = 0, 1


@triton.jit
def _norm_forward(
    x_ptr, w_ptr, y_ptr, rows, H, eps, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (col < H)[None, :]
    at = row[:, None] * H + col[None, :]
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(w_ptr + col, mask=col < H, other=0.0).to(tl.float32) + OFFSET
    unit = x * tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
    if ROUND:
        unit = unit.to(dtype).to(tl.float32)
    tl.store(y_ptr + at, (unit * scale[None, :]).to(dtype), mask=mask)


@triton.jit
def _norm_backward(
    x_ptr,
    w_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    H,
    eps,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    DX: tl.constexpr,
    DW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    pid = tl.program_id(0)
    col = tl.arange(0, COLS)
    dtype = x_ptr.dtype.element_ty
    scale = tl.load(w_ptr + col, mask=col < H, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(pid * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < H)[None, :]
        at = row[:, None] * H + col[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
        unit = x * rstd
        if DX:
            dunit = dy * scale[None, :]
            along = (tl.sum(dunit * unit, 1) / H)[:, None]
            tl.store(dx_ptr + at, (rstd * (dunit - unit * along)).to(dtype), mask=mask)
        if DW:
            total += dy * (unit.to(dtype).to(tl.float32) if ROUND else unit)
    if DW:
        tl.store(partial_ptr + pid.to(tl.int64) * H + col, tl.sum(total, 0), mask=col < H)


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    """The activation and its derivative; GELU's tanh form is x·sigmoid(2u), u = √(2/π)(x + 0.044715x³)."""
    if KIND == 0:
        s = tl.sigmoid(gate)
        return gate * s, s * (1 + gate * (1 - s))
    else:  # noqa: RET505 - Triton drops the other branch only so
        s = tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * gate * gate))
        du = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        return gate * s, s + gate * s * (1 - s) * du


@triton.jit
def _act_mul_forward(gate_ptr, up_ptr, out_ptr, cols, gate_row, up_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    dtype = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    act, _ = _activation(gate, KIND)
    tl.store(out_ptr + row * cols + col, (act.to(dtype).to(tl.float32) * up).to(dtype), mask=mask)


@triton.jit
def _act_mul_backward(
    d_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    cols,
    gate_row,
    up_row,
    out_row,
    KIND: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    at = row * cols + col
    dtype = gate_ptr.dtype.element_ty
    d = tl.load(d_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    act, slope = _activation(gate, KIND)
    act = act.to(dtype).to(tl.float32)
    out = row * out_row + col
    tl.store(dgate_ptr + out, (d * up * slope).to(dtype), mask=mask)
    tl.store(dup_ptr + out, (d * act).to(dtype), mask=mask)
    if PRODUCT:
        tl.store(d_ptr + at, (act * up).to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head,
    out_head,
    cos1,
    cos2,
    sin1,
    sin2,
    heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    head = tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (d < half)[None, :]
    at = head[:, None] * x_head + d[None, :]
    dtype = x_ptr.dtype.element_ty
    a = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        first = (a * cos1).to(dtype).to(tl.float32) + (b * sin2).to(dtype).to(tl.float32)
        second = (b * cos2).to(dtype).to(tl.float32) - (a * sin1).to(dtype).to(tl.float32)
    else:
        first = (a * cos1).to(dtype).to(tl.float32) - (b * sin1).to(dtype).to(tl.float32)
        second = (b * cos2).to(dtype).to(tl.float32) + (a * sin2).to(dtype).to(tl.float32)
    at = head[:, None] * out_head + d[None, :]
    tl.store(out_ptr + at, first.to(dtype), mask=mask)
    tl.store(out_ptr + at + half, second.to(dtype), mask=mask)


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    q_out,
    k_out,
    cos_ptr,
    sin_ptr,
    L,
    q_heads,
    k_heads,
    half,
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_l,
    qo_b,
    qo_h,
    qo_l,
    ko_b,
    ko_h,
    ko_l,
    angle_b,
    angle_l,
    BACK: tl.constexpr,
    QH: tl.constexpr,
    KH: tl.constexpr,
    HALF: tl.constexpr,
):
    b = (tl.program_id(0) // L).to(tl.int64)
    at = (tl.program_id(0) % L).to(tl.int64)
    d = tl.arange(0, HALF)
    angle = b * angle_b + at * angle_l + d
    cos1 = tl.load(cos_ptr + angle, mask=d < half, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + angle + half, mask=d < half, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + angle, mask=d < half, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + angle + half, mask=d < half, other=0.0).to(tl.float32)[None, :]
    q_from, q_to = q_ptr + b * q_b + at * q_l, q_out + b * qo_b + at * qo_l
    k_from, k_to = k_ptr + b * k_b + at * k_l, k_out + b * ko_b + at * ko_l
    _rotate_heads(q_from, q_to, q_h, qo_h, cos1, cos2, sin1, sin2, q_heads, half, BACK, QH, HALF)
    _rotate_heads(k_from, k_to, k_h, ko_h, cos1, cos2, sin1, sin2, k_heads, half, BACK, KH, HALF)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def _warps(elements: int, each: int = 8) -> int:
    return max(1, min(16, elements // (32 * each)))


def _tile(rows: int, H: int, elements: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps: few rows are spread over many programs."""
    COLS = triton.next_power_of_2(H)
    ROWS = max(1, min(elements // COLS, triton.next_power_of_2(max(1, rows // 512))))
    return ROWS, COLS, _warps(ROWS * COLS, 16)


def norm(
    x: Tensor, weight_H: Tensor, eps: float, offset: bool, rounds: bool, tile: tuple[int, int, int] | None = None
) -> Tensor:
    """x / rms(x) · (offset + weight) over the last dimension; `rounds`: to x's type before the product."""
    x = x.contiguous()
    y, H = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // H
    ROWS, COLS, warps = tile or _tile(rows, H, 2048)
    with _on(x):
        _norm_forward[(triton.cdiv(rows, ROWS),)](
            x, weight_H, y, rows, H, eps, int(offset), rounds, ROWS, COLS, num_warps=warps
        )
    return y


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    offset: bool,
    rounds: bool,
    needs: tuple[bool, bool],
    tile: tuple[int, int, int] | None = None,
    waves: int = WAVES,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the weight, where `needs` asks for them."""
    x, dy, H = x.contiguous(), dy.contiguous(), x.shape[-1]
    rows = x.numel() // H
    ROWS, COLS, warps = tile or _tile(rows, H, 2048)
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = min(triton.cdiv(rows, ROWS), max(1, waves * units * 4 // warps))
    dx = torch.empty_like(x) if needs[0] else None
    partial = torch.empty(programs, H, dtype=torch.float32, device=x.device) if needs[1] else None
    with _on(x):
        _norm_backward[(programs,)](
            x,
            weight_H,
            dy,
            x if dx is None else dx,
            x if partial is None else partial,
            rows,
            H,
            eps,
            int(offset),
            rounds,
            needs[0],
            needs[1],
            ROWS,
            COLS,
            num_warps=warps,
        )
    return dx, None if partial is None else partial.sum(0).to(weight_H.dtype)


def _rows(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, int, int, int, int]:
    """Both as rows a constant stride apart (halves of one tensor, say), or as one long row if nothing lies between."""
    if gate.is_contiguous() and up.is_contiguous():
        return gate, up, 1, gate.numel(), 0, 0
    strides = []
    for x in (gate, up):
        regular = x.stride(-1) == 1 and all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
        strides.append(x.stride(-2) if regular and x.dim() > 1 else 0)
    if not all(strides):
        return gate.contiguous(), up.contiguous(), 1, gate.numel(), 0, 0
    return gate, up, gate.numel() // gate.shape[-1], gate.shape[-1], strides[0], strides[1]


def act_mul(gate: Tensor, up: Tensor, kind: int, block: int = BLOCK, warps: int | None = None) -> Tensor:
    """act(gate) · up."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up, rows, cols, gate_row, up_row = _rows(gate, up)
    with _on(gate):
        _act_mul_forward[(rows * triton.cdiv(cols, block),)](
            gate, up, out, cols, gate_row, up_row, kind, block, num_warps=warps or _warps(block)
        )
    return out


def act_mul_backward(
    d: Tensor, gate: Tensor, up: Tensor, kind: int, product: bool, block: int = BLOCK, warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from that of their product, `d`, contiguous. `product`: it is written over d.

    Where gate and up are rows apart, as halves of one tensor are, so are their gradients: halves of one tensor.
    """
    shape = gate.shape
    gate, up, rows, cols, gate_row, up_row = _rows(gate, up)
    halved = gate_row > 0
    like = {"dtype": gate.dtype, "device": gate.device}
    if halved:
        dgate, dup = torch.empty(*shape[:-1], 2 * cols, **like).chunk(2, -1)
    else:
        dgate, dup = torch.empty(2, *shape, **like)
    with _on(gate):
        _act_mul_backward[(rows * triton.cdiv(cols, block),)](
            d, gate, up, dgate, dup, cols, gate_row, up_row, 2 * cols if halved else cols, kind, product, block,
            num_warps=warps or _warps(block),
        )  # fmt: skip
    return dgate, dup


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool = False, warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """q [B,Hq,L,D] and k [B,Hk,L,D], their halves rotated by the angles [B or 1,L,D]; `back`: the transposed map."""
    q, k = _last_contiguous(q), _last_contiguous(k)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = _last_contiguous(torch.empty_like(q)), _last_contiguous(torch.empty_like(k))
    B, q_heads, L, D = q.shape
    QH, KH, HALF = (triton.next_power_of_2(n) for n in (q_heads, k.shape[1], D // 2))
    with _on(q):
        _rotate[(B * L,)](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            L,
            q_heads,
            k.shape[1],
            D // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            back,
            QH,
            KH,
            HALF,
            num_warps=warps or _warps(QH * HALF),
        )
    return q_out, k_out
