# mypy: ignore-errors
"""The kernel of linear.py: a product whose input is normed on the way, and perhaps an activation behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from .fused import _activation


@triton.jit
def norm_linear(
    x, scale, weight, bias, y, rows, N, eps, x_row,
    K: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [rows,N]. The norm's root is known when all of a row was read: it divides the sums, not the row.

    KIND ≥ 0: the weight has 2N rows, of gate and up, and y is act(gate)·up. Programs of the same columns are
    neighbours, so that they find the weight in the cache.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    dtype = x.dtype.element_ty
    there, within = (row < rows)[:, None], (col < N)[:, None]
    x_ptr = x + row.to(tl.int64)[:, None] * x_row + depth[None, :]
    w_ptr = weight + col.to(tl.int64)[:, None] * K + depth[None, :]
    up_ptr = w_ptr + N.to(tl.int64) * K
    scale_ptr = scale + depth
    square = tl.zeros([ROWS, DEPTH], tl.float32)
    sum_RC = tl.zeros([ROWS, COLS], tl.float32)
    up_RC = tl.zeros([ROWS, COLS], tl.float32)
    for _ in range(0, K, DEPTH):
        x_RK = tl.load(x_ptr, mask=there, other=0.0)
        w_CK = tl.load(w_ptr, mask=within, other=0.0)
        wide_RK = x_RK.to(tl.float32)
        square += wide_RK * wide_RK
        scaled_RK = x_RK * tl.load(scale_ptr)[None, :]  # in 16 bits, two at a time
        sum_RC = tl.dot(scaled_RK, tl.trans(w_CK), sum_RC)
        if KIND >= 0:
            up_CK = tl.load(up_ptr, mask=within, other=0.0)
            up_RC = tl.dot(scaled_RK, tl.trans(up_CK), up_RC)
        x_ptr += DEPTH
        w_ptr += DEPTH
        up_ptr += DEPTH
        scale_ptr += DEPTH
    root = tl.rsqrt(tl.sum(square, 1) / K + eps)[:, None]
    found = sum_RC * root
    if BIAS:
        found += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if KIND >= 0:
        up = up_RC * root
        if BIAS:
            up += tl.load(bias + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        act, _ = _activation(found.to(dtype).to(tl.float32), KIND)
        found = act.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    y_ptr = y + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_ptr, found.to(dtype), mask=there & (col < N)[None, :])
