"""Checks of the decoding kernels, run under Triton's interpreter (test_decode.py) or on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from rpg.kernels.decode import FP8, LayerCache, Unfinished, decode_attention, launch, reference

CPU = torch.device("cpu")


def repair_dot() -> None:
    """The interpreter of Triton 3.7 keeps bfloat16 as integers and multiplies those: raise them to float32 first."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    dot = InterpreterBuilder.create_dot

    def raised(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != "uint16":
            return x
        return TensorHandle(_convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, raised(a), raised(b), *rest)


def repair_rounding() -> None:
    """The interpreter loses what is carried when it rounds to 8 bits: torch does it."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, kind: Any, mode: Any) -> Any:
        if kind.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
            return cast(self, src, kind, mode)
        data = torch.from_numpy(numpy.ascontiguousarray(src.data)).to(FP8).view(torch.uint8).numpy()
        return TensorHandle(data, tl.float8e4nv)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


if os.environ.get("TRITON_INTERPRET") == "1":
    repair_dot()
    repair_rounding()


def case(
    groups: int = 2,
    group: int = 3,
    width: int = 16,
    prompts: tuple[int, ...] = (5, 21),
    prompt: tuple[int, ...] = (0, 1, 0, 1, 1),
    length: tuple[int, ...] = (7, -1, 0, 19, 33),
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    device: torch.device = CPU,
    seed: int = 0,
) -> dict[str, Any]:
    """Random inputs; NaN in the pages wherever there is no token yet, and no page where a table need not have one."""
    generator = torch.Generator().manual_seed(seed)
    count, slots = len(prompt), len(prompt) + 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    slot = torch.randperm(slots, generator=generator)[:count]
    held = torch.full((slots,), -1)
    held[slot] = torch.tensor(length)
    needed = [-(-tokens // page) for tokens in prompts] + [tokens // page + 1 for tokens in held.tolist()]
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = torch.full((len(needed), max(needed) + 1), 10**6, dtype=torch.int32)
    plain = [torch.full((len(free), groups, page, width), torch.nan) for _ in range(2)]
    cache = LayerCache.empty(
        len(free), draw(1, groups, 1, width).to(dtype), draw(1, groups, 1, width).to(dtype), fp8, page
    )
    cache.put(torch.arange(len(free))[:, None], torch.arange(page), *(x.transpose(1, 2).to(dtype) for x in plain))
    for i, tokens in enumerate([*prompts, *held.tolist()]):
        tables[i, : needed[i]] = torch.tensor([free.pop() for _ in range(needed[i])], dtype=torch.int32)
        at = torch.arange(max(0, tokens))
        new = [draw(len(at), groups, width).to(dtype) for _ in range(2)]
        cache.put(tables[i, at // page].long(), at % page, *new)
    query = draw(count, 1, groups * group, width).transpose(1, 2).squeeze(2)
    key, value = draw(count, groups, 2, width).unbind(2)  # neither is contiguous
    indices = [torch.tensor(prompt), torch.tensor(prompts)[list(prompt)], slot, torch.tensor(length)]
    for i, tokens in enumerate(length):
        if tokens < 0:
            indices[0][i], indices[1][i], indices[2][i] = 10**6, 10**6, -(10**6)
    found: dict[str, Any] = {"query_AHD": query.to(device, dtype)}
    found |= {"key_AGD": key.to(device, dtype), "value_AGD": value.to(device, dtype)}
    found["cache"] = LayerCache(*(x if x is None else x.to(device) for x in whole(cache)))
    found |= {"prompt_page_QM": tables[: len(prompts)].to(device), "page_SR": tables[len(prompts) :].to(device)}
    for name, index in zip(("prompt_A", "prompt_length_A", "slot_A", "length_A"), indices, strict=True):
        found[name] = index.to(device, torch.int32)
    return found | {"scaling": width**-0.5}


def whole(cache: LayerCache) -> list[Any]:
    return [cache.keys_CGTD, cache.values_CGTD, cache.key_scale_CGT, cache.value_scale_CGT]


def double(given: dict[str, Any]) -> dict[str, Any]:
    """A copy with every tensor of numbers in float64; 8 bits stay 8 bits."""

    def raised(x: Any) -> Any:
        if isinstance(x, LayerCache):
            return LayerCache(*(None if part is None else raised(part) for part in whole(x)))
        if isinstance(x, Unfinished):
            return replace(x, angles=raised(x.angles), weights=raised(x.weights))
        if isinstance(x, tuple):
            return tuple(raised(part) for part in x)
        if not torch.is_tensor(x):
            return x
        return x.double() if x.is_floating_point() and x.dtype != FP8 else x.clone()

    return {name: raised(x) for name, x in given.items()}


def compare(given: dict[str, Any], window: int | None = None, **settings: Any) -> None:
    """The kernel against the reference in float64: the output, and every byte of the caches."""
    exact = double(given)
    want = reference(**exact, window=window)
    got = launch(**given, window=window, **settings)
    half = given["query_AHD"].dtype != torch.float32 or given["cache"].key_scale_CGT is not None
    torch.testing.assert_close(got.double(), want, rtol=2e-2 if half else 2e-5, atol=2e-2 if half else 2e-6)
    for found, wanted in zip(given["cache"].parts, exact["cache"].parts, strict=True):
        near = 1e-6 if given["cache"].key_scale_CGT is not None else 0  # scales are in float32
        small = near * near
        if given.get("unfinished") is not None:
            near, small = 1e-5, 1e-7  # a rotation is a difference
        torch.testing.assert_close(found.double(), wanted.double(), rtol=near, atol=small, equal_nan=True)


def check_groups_and_splits() -> None:
    for group in (1, 3, 7, 16):
        for splits in (1, 3):
            compare(case(group=group), splits=splits, block=16)


def check_widths() -> None:
    for width in (16, 24, 80):
        for splits in (1, 2):
            compare(case(width=width, groups=1), splits=splits, block=16)


def check_windows() -> None:
    for window in (1, 2, 5, 16, 20, 21, 34, 100):
        for splits in (1, 3):
            compare(case(groups=1), window=window, splits=splits, block=16)


def check_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for splits in (1, 3):
            compare(case(dtype=dtype, width=32), splits=splits, block=16)


def check_8_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for splits in (1, 3):
            compare(case(dtype=dtype, width=32, fp8=True), splits=splits, block=16)
    compare(case(groups=1, width=24, fp8=True), window=20, splits=2, block=16)


def check_8_bits_of_nothing_and_of_very_different_sizes() -> None:
    """A vector of zeros has a scale that can be divided by; each vector has its own."""
    given = case(width=32, fp8=True)
    for name in ("key_AGD", "value_AGD"):
        given[name] = given[name].contiguous()
        for row, factor in enumerate((0.0, 1.0, 1e-20, 1e3, 1.0)):
            given[name][row] *= factor
    given["query_AHD"][3] *= 1e-3
    for splits in (1, 3):
        compare(given, splits=splits, block=16)


def check_pages_of_several_blocks() -> None:
    for splits in (1, 3):
        compare(case(prompts=(64, 100), length=(7, -1, 63, 64, 129), page=64), splits=splits, block=32)
        compare(case(prompts=(64, 100), length=(7, -1, 63, 64, 129), page=64), window=70, splits=splits)


def check_more_splits_than_blocks_and_own_settings() -> None:
    compare(case(length=(0, 1, 2, 3, 4), page=32), splits=9, block=32)
    given = case()
    exact = double(given)
    got = decode_attention(**given)
    torch.testing.assert_close(got.double(), reference(**exact), rtol=2e-5, atol=2e-6)


def check_prompts_that_fill_their_row_and_empty_ones() -> None:
    for splits in (1, 4):
        compare(case(prompts=(0, 48), length=(36, 0, -1, 16, 32)), splits=splits, block=16)


def check_all_rows_dead_and_no_rows() -> None:
    given = case(length=(-1,) * 5)
    before = [x.clone() for x in given["cache"].parts]
    for splits in (1, 3):
        assert (launch(**given, splits=splits) == 0).all()
    for x, was in zip(given["cache"].parts, before, strict=True):
        torch.testing.assert_close(x, was, rtol=0, atol=0, equal_nan=True)
    empty = {name: x[:0] if name in ("query_AHD", "key_AGD", "value_AGD") else x for name, x in given.items()}
    assert launch(**empty).shape == (0, 6, 16)


def unfinished(given: dict[str, Any], turned: bool = True, normed: bool = True, seed: int = 5) -> Unfinished:
    """Angles whose halves differ, so that no other pairing passes; weights that are not ones."""
    query = given["query_AHD"]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, len(query), query.shape[-1], generator=generator).to(query.device, query.dtype)
    return Unfinished((rows[0], rows[1]) if turned else None, (rows[2, 0], rows[3, 0]) if normed else None, eps=1e-2)


def check_rotation_and_norms_of_heads() -> None:
    for group, width, splits in ((3, 16, 1), (1, 24, 3)):
        given = case(group=group, width=width)
        for turned, normed in ((True, False), (False, True), (True, True)):
            for offset in (False, True) if normed else (False,):
                todo = replace(unfinished(given, turned, normed), offset=offset, rounds=not offset)
                compare(given | {"unfinished": todo}, splits=splits, block=16)


def check_rotation_by_the_same_angles_for_all_and_by_angles_apart() -> None:
    given = case(groups=1)
    todo = unfinished(given)
    assert todo.angles is not None
    cos, sin = todo.angles
    for angles in ((cos[:1], sin[:1]), (torch.cat([cos, cos], 1)[:, :16], sin), (cos.T.contiguous().T, sin)):
        compare(given | {"unfinished": replace(todo, angles=angles)}, splits=2, block=16)


def check_rotation_and_norms_with_8_bits_and_half_precision() -> None:
    for dtype, fp8 in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        given = case(dtype=dtype, width=32, fp8=fp8)
        given["unfinished"] = unfinished(given)
        want = reference(**double(given))
        for splits in (1, 3):
            got = launch(**given, splits=splits, block=16)
            torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=5e-2)


def check_keys_are_rounded_as_the_model_rounds() -> None:
    """In float16, which the interpreter rounds as it should: every byte of the cache is that of the same in torch."""
    for fp8 in (False, True):
        given = case(group=4, width=64, dtype=torch.float16, fp8=fp8)
        given["unfinished"] = unfinished(given)
        plain = given | {"cache": LayerCache(*(x if x is None else x.clone() for x in whole(given["cache"])))}
        want, got = reference(**plain), launch(**given)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
        for found, wanted in zip(given["cache"].parts, plain["cache"].parts, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def check_generating_token_by_token_is_attention_over_the_whole() -> None:
    """Twelve steps: the caches that the kernel fills itself are what later steps read."""
    generator = torch.Generator().manual_seed(3)
    steps, tokens, width = 12, 5, 16
    sequence = torch.randn(3, 2, tokens + steps, width, generator=generator)  # q, k, v of two rows
    key, value = (sequence[i, :, None, :tokens] for i in (1, 2))
    cache = LayerCache.empty(6, key, value, fp8=False, page=16)
    prompt_page, page = torch.tensor([[3], [5]], dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    for row in range(2):
        cache.put(prompt_page[row].long(), torch.arange(tokens), key[row].transpose(0, 1), value[row].transpose(0, 1))
    want = torch.nn.functional.scaled_dot_product_attention(*sequence.double(), is_causal=True)
    slot, which = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for step in range(steps):
        q, k, v = (sequence[i, :, None, tokens + step] for i in range(3))
        length = torch.tensor([step, step], dtype=torch.int32)
        size = torch.full((2,), tokens, dtype=torch.int32)
        got = decode_attention(q, k, v, cache, prompt_page, page, which, size, slot, length, width**-0.5)
        torch.testing.assert_close(got[:, 0].double(), want[:, tokens + step], rtol=2e-5, atol=2e-6)


def check_the_engines_check_of_8_bits() -> None:
    """What is right passes by a wide margin, whatever the width and the dtype; every mistake is far beyond it."""
    import pytest
    import triton.language as tl

    from rpg.kernels.triton import decode
    from rpg.rollout.self_check import LARGEST_ERROR_IN_8_BITS, check_8_bits, error_in_8_bits

    def error(width: int = 64, dtype: torch.dtype = torch.float32) -> float:
        error_in_8_bits.cache_clear()
        return error_in_8_bits(width, dtype, CPU)

    for width, dtype in ((64, torch.float32), (128, torch.float16), (24, torch.float32)):
        assert error(width, dtype) < LARGEST_ERROR_IN_8_BITS / 3

    own, attend = decode.halves, decode.attend

    def swapped(even: Any, odd: Any, pair: Any) -> Any:
        return odd, even

    def too_small(even: Any, odd: Any, pair: Any) -> Any:
        return even, odd * 0.5

    def positive(even: Any, odd: Any, pair: Any) -> Any:
        return tl.abs(even), odd

    def flushed(even: Any, odd: Any, pair: Any) -> Any:
        return tl.where(tl.abs(even) < 2.0**-6, 0.0, even).to(tl.float16), odd

    def one_number(even: Any, odd: Any, pair: Any) -> Any:
        return even, tl.where((pair & 0x7F00) == 0x0100, 0.0, odd).to(tl.float16)

    for broken in (swapped, too_small, positive, flushed, one_number):
        decode.halves = lambda pair, asm, broken=broken: broken(*own(pair, asm), pair)
        assert error() > 4 * LARGEST_ERROR_IN_8_BITS, broken
    cache = LayerCache.empty(1, torch.empty(1, 1, 1, 64), torch.empty(1, 1, 1, 64), fp8=True)
    with pytest.raises(ValueError, match=r"^attention over a cache in 8 bits is wrong by .*: leave rollout"):
        check_8_bits([cache], torch.float32)
    decode.halves = own

    class Swapped:  # two of its arguments
        def __init__(self, one: int, other: int):
            self.pair = one, other

        def __getitem__(self, grid: Any) -> Any:
            def call(*given: Any, **named: Any) -> None:
                order = list(range(len(given)))
                order[self.pair[0]], order[self.pair[1]] = self.pair[::-1]
                attend[grid](*(given[i] for i in order), **named)

            return call

    for one, other in ((7, 8), (5, 6)):  # scales, and what is read, of keys and of values
        decode.attend = Swapped(one, other)
        assert error() > 4 * LARGEST_ERROR_IN_8_BITS, (one, other)
    decode.attend = attend
    assert error() < LARGEST_ERROR_IN_8_BITS / 3
