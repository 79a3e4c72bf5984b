"""Checks of the decoding kernels, run under Triton's interpreter (test_decode.py) or on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from rpg.kernels.decode import decode_attention, launch, reference

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


if os.environ.get("TRITON_INTERPRET") == "1":
    repair_dot()


def case(
    groups: int = 2,
    group: int = 3,
    width: int = 16,
    prompts: tuple[int, ...] = (5, 21),
    prompt: tuple[int, ...] = (0, 1, 0, 1, 1),
    length: tuple[int, ...] = (7, -1, 0, 19, 33),
    room: tuple[int, int] = (40, 37),
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
) -> dict[str, Any]:
    """Random inputs; NaN in the caches wherever there is no token yet."""
    generator = torch.Generator().manual_seed(seed)
    count, slots = len(prompt), len(prompt) + 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    slot = torch.randperm(slots, generator=generator)[:count]
    pair = [draw(len(prompts), groups, room[0], width) for _ in range(2)]
    for cache in pair:
        for i, tokens in enumerate(prompts):
            cache[i, :, tokens:] = torch.nan
    own = [draw(slots, groups, room[1], width) for _ in range(2)]
    for cache in own:
        held = torch.full((slots,), 0)
        held[slot] = torch.tensor(length).clamp(min=0)
        for i, tokens in enumerate(held.tolist()):
            cache[i, :, tokens:] = torch.nan
    query = draw(count, 1, groups * group, width).transpose(1, 2).squeeze(2)
    key, value = draw(count, groups, 2, width).unbind(2)  # neither is contiguous
    indices = [torch.tensor(prompt), torch.tensor(prompts)[list(prompt)], slot, torch.tensor(length)]
    for i, tokens in enumerate(length):
        if tokens < 0:
            indices[0][i], indices[1][i], indices[2][i] = 10**6, 10**6, -(10**6)
    names = ["query_AHD", "key_AGD", "value_AGD", "prompt_keys_PGMD", "prompt_values_PGMD", "keys_SGRD", "values_SGRD"]
    tensors = [x.to(device, dtype) for x in (query, key, value, *pair, *own)]
    found: dict[str, Any] = dict(zip(names, tensors, strict=True))
    for name, index in zip(("prompt_A", "prompt_length_A", "slot_A", "length_A"), indices, strict=True):
        found[name] = index.to(device, torch.int32)
    return found | {"scaling": width**-0.5}


def double(given: dict[str, Any]) -> dict[str, Any]:
    """A copy with every tensor of numbers in float64."""
    return {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x.clone() if torch.is_tensor(x) else x
        for name, x in given.items()
    }


def compare(given: dict[str, Any], window: int | None = None, **settings: Any) -> None:
    """The kernel against the reference in float64: the output, and every byte of the caches."""
    exact = double(given)
    want = reference(**exact, window=window)
    got = launch(**given, window=window, **settings)
    half = given["query_AHD"].dtype != torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-2 if half else 2e-5, atol=2e-2 if half else 2e-6)
    for name in ("keys_SGRD", "values_SGRD", "prompt_keys_PGMD", "prompt_values_PGMD"):
        torch.testing.assert_close(given[name].double(), exact[name], rtol=0, atol=0, equal_nan=True)


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


def check_more_splits_than_blocks_and_own_settings() -> None:
    compare(case(length=(0, 1, 2, 3, 4)), splits=9, block=32)
    given = case()
    exact = double(given)
    got = decode_attention(**given)
    torch.testing.assert_close(got.double(), reference(**exact), rtol=2e-5, atol=2e-6)


def check_prompts_that_fill_their_row_and_empty_ones() -> None:
    compare(case(prompts=(0, 40), length=(36, 0, -1, 16, 32)), splits=1, block=16)
    compare(case(prompts=(0, 40), length=(36, 0, -1, 16, 32)), splits=4, block=16)


def check_all_rows_dead_and_no_rows() -> None:
    given = case(length=(-1,) * 5)
    before = {name: x.clone() for name, x in given.items() if torch.is_tensor(x)}
    for splits in (1, 3):
        assert (launch(**given, splits=splits) == 0).all()
    for name, x in before.items():
        torch.testing.assert_close(given[name], x, rtol=0, atol=0, equal_nan=True)
    empty = {name: x[:0] if name in ("query_AHD", "key_AGD", "value_AGD") else x for name, x in given.items()}
    assert launch(**empty).shape == (0, 6, 16)


def check_generating_token_by_token_is_attention_over_the_whole() -> None:
    """Twelve steps: the caches that the kernel fills itself are what later steps read."""
    generator = torch.Generator().manual_seed(3)
    steps, tokens, width = 12, 5, 16
    sequence = torch.randn(3, 2, tokens + steps, width, generator=generator)  # q, k, v of two rows
    prompt_keys, prompt_values = (sequence[i, :, None, :tokens].clone() for i in (1, 2))
    keys, values = torch.full((2, 2, 1, steps, width), torch.nan).unbind(0)
    want = torch.nn.functional.scaled_dot_product_attention(*sequence.double(), is_causal=True)
    slot, which = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for step in range(steps):
        q, k, v = (sequence[i, :, None, tokens + step] for i in range(3))
        length = torch.tensor([step, step], dtype=torch.int32)
        size = torch.full((2,), tokens, dtype=torch.int32)
        got = decode_attention(
            q, k, v, prompt_keys, prompt_values, keys, values, which, size, slot, length, width**-0.5
        )
        torch.testing.assert_close(got[:, 0].double(), want[:, tokens + step], rtol=2e-5, atol=2e-6)
