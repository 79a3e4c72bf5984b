"""Attention over sequences laid end to end, without padding; responses to one prompt share one copy of it.

A pack of N tokens holds S sequences. Each has queries, a run of the pack, and keys: the same run, with the shared
prompt before it. A prompt stands in the run of its first response; the responses after that one share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .custom_attention import custom_attention

FLASH_WIDTHS = range(8, 257, 8)  # of a head
Places = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]  # see Packing: key_K, own_N, again


@dataclass(frozen=True)
class Packing:
    """Indices are into the pack where nothing else is said. K: the keys of all sequences, R: response tokens."""

    token_N: Tensor  # in ids.flatten()
    position_N: Tensor
    state_R: Tensor  # the state that predicts each response token
    target_R: Tensor  # that token, in ids.flatten()
    place_R: Tensor  # and in mask.flatten()
    query_ends: Tensor  # [S+1], int32: 0, and where the queries of each sequence end
    key_ends: Tensor  # and its keys, in K
    key_K: Tensor  # the keys, a sequence after the other
    own_N: Tensor  # in K: each token as a key of its own sequence
    again: tuple[Tensor, Tensor] | None  # shared tokens as keys of further sequences: where in K, and which
    queries: int  # the most of a sequence
    keys: int
    cache: dict[Any, Any] = field(default_factory=dict)  # what the layers of one pass have in common

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]


def pack(
    start_B: Tensor,
    mask_BT: Tensor,
    width: int,
    prompt_B: Tensor | None = None,
    device: torch.device | None = None,
) -> Packing:
    """Of sequences [B, width] padded on the right: the response of row b begins at start_B[b], mask_BT is true on it.

    Rows with the same prompt number have the same prompt. A response's last token predicts nothing and is left out.
    All indices are made on the CPU: one copy comes from the device, one goes there. Of tensors on the host, with
    ``device``, nothing waits.
    """
    number_B = torch.arange(len(start_B), device=start_B.device) if prompt_B is None else prompt_B
    about = torch.cat([start_B[:, None], number_B[:, None], mask_BT], 1).cpu().numpy()
    mask = about[:, 2:] != 0
    lengths = np.where(mask.any(1), mask.shape[1] - mask[:, ::-1].argmax(1), 0)  # up to the last token that counts
    prompts: dict[int, tuple[int, int]] = {}  # number -> where it begins in the pack, its length
    token, key, own, source, target = ([np.empty(0, np.int64)] for _ in range(5))
    position, query_ends, key_ends = [np.empty(0, np.int64)], [0], [0]
    state: list[Any] = [np.empty(0, np.int64)] * len(about)
    for b in np.argsort(about[:, 1], kind="stable").tolist():
        (n, number), t = about[b, :2].tolist(), int(lengths[b])
        if t == 0:
            continue
        begin, key_begin = query_ends[-1], key_ends[-1]
        at, length = prompts.setdefault(number, (begin, n))
        if length != n:
            raise ValueError(f"prompt_B: rows of prompt {number} have prompts of {length} and {n} tokens")
        shared = n if at != begin else 0  # tokens of the prompt that stand elsewhere
        run = np.arange(shared, n + t - 1)
        where = np.concatenate([np.arange(at, at + shared), begin + run - shared])  # position -> place in the pack
        state[b] = where[n - 1 :][mask[b, :t]]
        if not len(run):
            continue
        token.append(b * width + run)
        position.append(run)
        key.append(where)
        own.append(key_begin + run)
        source.append(key_begin + np.arange(shared))
        target.append(where[:shared])
        query_ends.append(begin + len(run))
        key_ends.append(key_begin + len(where))
    row, t_R = mask.nonzero()
    place, counted = row * mask.shape[1] + t_R, row * width + about[row, 0] + t_R
    arrays = [*map(np.concatenate, (token, position, state)), counted, place]
    arrays += [*map(np.array, (query_ends, key_ends)), *map(np.concatenate, (key, own, source, target))]
    whole = to_device(torch.from_numpy(np.concatenate(arrays)), device or start_B.device)
    indices = torch.split(whole, [len(array) for array in arrays])
    token_N, position_N, state_R, target_R, place_R, query_begins, key_begins, key_K, own_N, again_K, again_N = indices
    return Packing(
        token_N,
        position_N,
        state_R,
        target_R,
        place_R,
        query_begins.int(),
        key_begins.int(),
        key_K,
        own_N,
        (again_K, again_N) if len(again_K) else None,
        queries=int(np.diff(query_ends).max(initial=0)),
        keys=int(np.diff(key_ends).max(initial=0)),
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting for what the device has still to do."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


# ---- attention -------------------------------------------------------------------------------------------------------


def attend(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """[N,H,D]. Each token attends to its own sequence up to itself, or to the last ``window`` of that."""
    width = query_NHD.shape[2]
    half = query_NHD.dtype in (torch.float16, torch.bfloat16)
    if query_NHD.is_cuda and half and width in FLASH_WIDTHS and value_NGD.shape[2] == width:
        if packing.again is not None:
            places = packing.key_K, packing.own_N, packing.again
            key_NGD, value_NGD = _spread(key_NGD, places), _spread(value_NGD, places)
        out: Tensor = _Flash.apply(query_NHD, key_NGD, value_NGD, packing, scale, window)  # type: ignore[no-untyped-call]
        return out
    return _attend_in_rows(query_NHD, key_NGD, value_NGD, packing, scale, window)


class _Flash(torch.autograd.Function):
    """PyTorch's own FlashAttention over sequences of any length; its causal mask is aligned at the sequences' ends."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        ctx.lengths = packing.query_ends, packing.key_ends, packing.queries, packing.keys
        ctx.how = {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        ctx.causal = window is None  # with a window it is the bound on the right that makes it causal
        out, *rest = torch.ops.aten._flash_attention_forward(
            query, key, value, *ctx.lengths, 0.0, ctx.causal, False, **ctx.how
        )
        ctx.save_for_backward(query, key, value, out, *rest[:3])
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *saved, random, unused = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad, *saved, *ctx.lengths, 0.0, ctx.causal, random, unused, **ctx.how
        )
        return *grads, None, None, None


def _attend_in_rows(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """Each sequence a row [S,L], a token in the column of its position: plain causal attention, whatever is shared.

    A shared prompt's queries come along in every row of it, so that all rows have one mask; they are not read.
    """
    index, own, again = packing.once("rows", lambda: _rows(packing))
    shape = len(packing.key_ends) - 1, packing.keys

    def in_rows(x_NHD: Tensor, again: tuple[Tensor, Tensor] | None) -> Tensor:
        return _spread(x_NHD, (index, own, again)).view(*shape, *x_NHD.shape[1:]).transpose(1, 2)

    narrow = window is not None and window < packing.keys
    mask = packing.once(window, lambda: _band(packing.keys, window, index.device)) if narrow else None
    out = torch.nn.functional.scaled_dot_product_attention(
        in_rows(query_NHD, None),
        in_rows(key_NGD, again),
        in_rows(value_NGD, again),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query_NHD.shape[1] != key_NGD.shape[1],
    )
    return _Take.apply(out.transpose(1, 2).flatten(0, 1), own)  # type: ignore[no-any-return, no-untyped-call]


def _rows(packing: Packing) -> Places:
    """As key_K, own_N and again, for keys padded to rows of one length."""
    lengths, column = packing.key_ends.diff(), torch.arange(packing.keys, device=packing.key_K.device)
    live = (column < lengths[:, None]).flatten()
    place_K = live.nonzero()[:, 0]
    index = torch.zeros(live.shape, dtype=torch.long, device=live.device).index_copy_(0, place_K, packing.key_K)
    again = packing.again
    return index, place_K[packing.own_N], None if again is None else (place_K[again[0]], again[1])


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    assert window is not None
    place = torch.arange(length, device=device)
    gap = place[:, None] - place[None, :]
    return (gap >= 0) & (gap < window)


def _spread(x: Tensor, places: Places) -> Tensor:
    return _Spread.apply(x, *places[:2], *(places[2] or (None, None)))  # type: ignore[no-any-return, no-untyped-call]


class _Spread(torch.autograd.Function):
    """x[index]. A row's gradient: that of its own place, and of those in which it stands again; no others count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, own: Tensor, source: Tensor | None, target: Tensor | None
    ) -> Tensor:
        ctx.places = own, source, target
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, source, target = ctx.places
        total = grad.index_select(0, own)
        if source is not None:
            wide = torch.promote_types(grad.dtype, torch.float32)  # sums over many responses
            total = total.to(wide).index_add_(0, target, grad.index_select(0, source).to(wide)).to(grad.dtype)
        return total, None, None, None, None


class _Take(torch.autograd.Function):
    """x[index], each row once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.rows = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, ctx.index, grad), None


# ---- in a transformers model -----------------------------------------------------------------------------------------


@contextmanager
def packed(configs: list[Any], packing: Packing) -> Iterator[list[int | None]]:
    """Within, attention layers with these configs attend over a pack. Gives the window of each layer that did."""
    windows: list[int | None] = []

    def over_the_pack(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        windows.append(window)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # x[0] would copy gradients
        return attend(query, key, value, packing, scale, window).unsqueeze(0)

    with custom_attention(configs, over_the_pack):
        yield windows
