"""Checks of the kernel that reads a prompt once for several rows, under Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.decode_checks import case, compare, double, unfinished, whole
from rpg.kernels.decode import LayerCache, PromptSettings, decode_attention, launch, reference

# two groups of four of which some have ended, a lone row, and a group that comes twice
PROMPTS = (37, 0, 16, 21)
PROMPT = (0, 0, 0, 0, 2, 2, 2, 2, 1, 3, 3, 0, 0)
LENGTH = (7, -1, 0, 19, 33, 16, -1, 1, 12, -1, 40, 3, 15)


def group_case(**options: Any) -> dict[str, Any]:
    return case(**({"prompts": PROMPTS, "prompt": PROMPT, "length": LENGTH} | options))


def tile(rows: int, splits: int = 1, block: int = 16) -> PromptSettings:
    return PromptSettings(rows, block, splits=splits)


def check_tiles_of_any_size() -> None:
    """Groups that tiles cut in two, tiles that are longer than all rows, tiles of one row."""
    for rows in (1, 2, 4, 8, 16):
        compare(group_case(), block=16, splits=1, prompts=tile(rows))


def check_query_heads_of_a_key_head() -> None:
    for group, rows in ((1, 4), (7, 4), (16, 2)):
        compare(group_case(group=group, groups=1), block=16, splits=1, prompts=tile(rows))


def check_splits_of_prompts_and_of_rows() -> None:
    """More of them than blocks, too: what they leave is empty."""
    for of_prompts in (1, 2, 5):
        for splits in (1, 3, 9):
            compare(group_case(), block=16, splits=splits, prompts=tile(4, of_prompts))


def check_windows_that_end_anywhere() -> None:
    """In the response, at its first token, in the prompt at other places for each row, before it."""
    for window in (1, 8, 17, 30, 41, 200):
        compare(group_case(), window, block=16, splits=1, prompts=tile(8))
        compare(group_case(), window, block=16, splits=2, prompts=tile(4, 2))


def check_rows_in_any_order() -> None:
    prompt = (3, 0, 2, 0, 1, 3, 0, 2, 2, 0, 0, 3, 1)
    for rows in (4, 16):
        for window in (None, 30):
            compare(group_case(prompt=prompt), window, block=16, splits=1, prompts=tile(rows))


def check_dead_rows() -> None:
    """A whole tile of them, the first of a group, and all: zeros, and nothing read or written."""
    length = (-1, -1, -1, -1, -1, 4, 5, 6, 12, -1, 40, 3, -1)
    compare(group_case(length=length), block=16, splits=1, prompts=tile(4))
    given = group_case(length=(-1,) * len(PROMPT))
    before = [x.clone() for x in given["cache"].parts]
    for splits in (1, 3):
        assert (launch(**given, splits=splits, block=16, prompts=tile(4, splits)) == 0).all()
    for x, was in zip(given["cache"].parts, before, strict=True):
        torch.testing.assert_close(x, was, rtol=0, atol=0, equal_nan=True)


def check_8_bits_and_half_precision() -> None:
    for dtype, fp8 in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)):
        given = group_case(dtype=dtype, width=32, fp8=fp8)
        given["unfinished"] = unfinished(given)
        for window in (None, 30):
            want = reference(**double(given), window=window)
            for splits in (1, 2):
                copy = given | {"cache": LayerCache(*(x if x is None else x.clone() for x in whole(given["cache"])))}
                got = launch(**copy, window=window, splits=splits, block=16, prompts=tile(4, splits))
                torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=5e-2)
    compare(group_case(width=24, fp8=True), block=16, splits=1, prompts=tile(4))


def check_rotation_and_norms_of_heads() -> None:
    for width in (16, 24):
        given = group_case(width=width)
        for turned, normed in ((True, False), (False, True), (True, True)):
            todo = unfinished(given, turned, normed)
            compare(given | {"unfinished": todo}, block=16, splits=1, prompts=tile(4))
            compare(given | {"unfinished": replace(todo, rounds=False, offset=True)}, splits=2, prompts=tile(8))
    cos, sin = unfinished(given).angles  # type: ignore[misc]
    one = replace(unfinished(given), angles=(cos[:1], sin[:1]))
    compare(given | {"unfinished": one}, block=16, splits=1, prompts=tile(4))


def check_pages_of_several_blocks_and_full_ones() -> None:
    given = {"prompts": (64, 100, 128, 0), "page": 64, "length": (*LENGTH[:10], 129, 63, 64)}
    for window in (None, 70):
        compare(group_case(**given), window, block=32, splits=1, prompts=tile(4, 2, block=16))
        compare(group_case(**given), window, block=16, splits=2, prompts=tile(8, 1, block=64))


def check_large_logits() -> None:
    """The largest may lie in the prompt or in the response, beyond what a power in float32 can hold."""
    for of_prompt in (0.1, 8.0):
        for splits, of_prompts in ((1, 1), (1, 2), (2, 2)):
            given = group_case()
            given["query_AHD"] *= 30
            for row, tokens in enumerate(PROMPTS):
                pages = given["prompt_page_QM"][row, : -(-tokens // 16)]
                given["cache"].keys_CGTD[pages.long()] *= of_prompt
            want = reference(**double(given))
            got = launch(**given, block=16, splits=splits, prompts=tile(4, of_prompts))
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def check_what_is_chosen() -> None:
    """The same through decode_attention, with settings of its own."""
    for samples in (4, 16):
        given = group_case()
        want = reference(**double(given))
        torch.testing.assert_close(decode_attention(**given, samples=samples).double(), want, rtol=2e-5, atol=2e-6)


# ---- settings of the rows' own kernel --------------------------------------------------------------------------------


def check_the_new_token_last() -> None:
    for options in ({}, {"fp8": True, "width": 32}, {"group": 7}):
        for window in (None, 6):
            for splits in (1, 3):
                compare(case(**options), window, splits=splits, block=16, late=True)
    given = case()
    compare(given | {"unfinished": unfinished(given)}, block=16, late=True)


def check_several_key_heads_of_a_program() -> None:
    for groups, group, key_heads in ((2, 7, 2), (4, 3, 4), (4, 4, 2)):
        for late in (False, True):
            for fp8 in (False, True):
                own = {"block": 16, "key_heads": key_heads, "late": late}
                given = case(groups=groups, group=group, width=32, fp8=fp8)
                given["unfinished"] = unfinished(given)
                rows = group_case(groups=groups, group=group, width=24, fp8=fp8)
                if not fp8:
                    compare(given, splits=1, **own)
                compare(case(groups=groups, group=group, fp8=fp8), 20, splits=2, **own)
                compare(rows, 30, splits=1, prompts=tile(4), **own)


def check_settings_that_do_not_fit() -> None:
    import pytest

    for settings in ({"key_heads": 4}, {"key_heads": 2, "group": 16}, {"key_heads": 3, "groups": 3}):
        options = {name: value for name, value in settings.items() if name != "key_heads"}
        with pytest.raises(ValueError, match="do not fit a program"):
            launch(**case(**options), key_heads=settings["key_heads"])
    with pytest.raises(ValueError, match="no multiple"):
        launch(**case(page=32), prompts=PromptSettings(4, 24))


# ---- that these checks see what is wrong -----------------------------------------------------------------------------


def check_mistakes_are_seen() -> None:
    """The kernel with one line changed: the checks refuse it."""
    import inspect
    import os
    import sys
    import tempfile
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    from rpg.kernels.triton import decode

    text = inspect.getsource(decode)

    def broken(old: str, new: str, count: int = 1) -> Any:
        assert text.count(old) == count, old
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "broken_decode.py"
            path.write_text(text.replace(old, new))
            spec = spec_from_file_location("broken_decode", path)
            assert spec is not None
            module = sys.modules["broken_decode"] = module_from_spec(spec)
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            return module

    def refused(check: Callable[[], None]) -> bool:
        """In a process of its own: reading a page that is not there may end it."""
        child = os.fork()
        if child == 0:
            try:
                check()
            except Exception:
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0

    mine, low = "mine_H = sees_H & (prompt_H == prompt)", "low_H = tl.maximum(shared_H + own_H + 1 - window, 0)"
    mistakes: list[tuple[str, str, Callable[[], None]]] = [
        (mine, "mine_H = sees_H", check_tiles_of_any_size),
        ("prompt_H > prompt", "prompt_H > 10**6", check_tiles_of_any_size),
        (low, "low_H = tl.maximum(shared_H + own_H - window, 0)", check_windows_that_end_anywhere),
        (low, "low_H = tl.maximum(tl.max(shared_H + own_H + 1 - window, 0), 0)", check_windows_that_end_anywhere),
        ("low, end = tl.min(low_mine_H, 0)", "low, end = tl.max(low_mine_H, 0)", check_windows_that_end_anywhere),
        ("other_sum_HD * add_H[:, None]", "other_sum_HD", check_splits_of_prompts_and_of_rows),
        ("mass_H * keep_H + other_mass_H * add_H", "mass_H + other_mass_H", check_splits_of_prompts_and_of_rows),
        ("return new_H, mass_H, sum_HD * keep_H", "return top_H, mass_H, sum_HD * keep_H", check_large_logits),
        ("place_H = row_H * parts + i", "place_H = row_H * parts", check_splits_of_prompts_and_of_rows),
        ("first_H = live_H & (split == 0)", "first_H = live_H", check_splits_of_prompts_and_of_rows),
        ("PAGE + own_H % PAGE", "PAGE + (own_H + 1) % PAGE", check_tiles_of_any_size),
        ("one_H = first_H & (i_H % GROUP == 0)", "one_H = first_H & (i_H == 0)", check_tiles_of_any_size),
        ("prompt_blocks, blocks = 0, blocks - prompt_blocks", "pass", check_tiles_of_any_size),
        ("live_H = live_H & (own_H >= 0)", "pass", check_dead_rows),
        ("of_B[None, :])", "of_B[None, :] * 0)", check_several_key_heads_of_a_program),
        ("        base_H = tl.where(new_H == float(\"-inf\"), 0.0, new_H)  #", "        base_H = new_H  #",
         check_splits_of_prompts_and_of_rows),
    ]  # fmt: skip
    own = decode.attend, decode.attend_prompts, decode.merge
    for old, new, check in mistakes:
        module = broken(old, new)
        decode.attend, decode.attend_prompts, decode.merge = module.attend, module.attend_prompts, module.merge
        seen = refused(check)
        decode.attend, decode.attend_prompts, decode.merge = own
        assert seen, (old, new)
    check_tiles_of_any_size()
