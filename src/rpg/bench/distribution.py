"""Is what the engine draws what the model says? Pairs of tokens from one prompt against exact probabilities."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ..kernels.sample_torch import truncate
from ..rollout import NativeEngine
from .shapes import make_model, make_tokenizer
from .sizes import Sizes

VOCABULARY, PROMPT, SPREAD, TOP_P = 64, [5, 9, 33, 2], 0.25, 0.9
FEWEST = 5.0  # expected draws of a cell of the test; rarer cells are put together


def distribution_rows(sizes: Sizes) -> list[tuple[str, Callable[[], float]]]:
    """Names and tests; in float32, where a token at the edge of top-p is on the same side for both."""
    half = [] if sizes.device == "cpu" else [("bfloat16", 1.0)]
    return [
        (f"rpg, {sizes.draws:,} pairs, {dtype}" + (f", top-p {top_p}" if top_p < 1 else ""), _test(sizes, dtype, top_p))
        for dtype, top_p in [("float32", 1.0), ("float32", TOP_P), *half]
    ]


def _test(sizes: Sizes, dtype: str, top_p: float) -> Callable[[], float]:
    def test() -> float:
        model = spread_out(make_model("tiny", sizes, dtype, vocab_size=VOCABULARY))
        exact = pair_probabilities(model, top_p)  # before the engine puts its own kernels into the model
        engine = NativeEngine(model, make_tokenizer(VOCABULARY), min(4096, sizes.draws))
        (found,) = engine.generate([PROMPT], sizes.draws, 2, 1.0, 7, top_p=top_p)
        return p_value(counted(found), exact)

    return test


@torch.no_grad()
def spread_out(model: Any) -> Any:
    """Weights wide enough for predictions that differ from place to place."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, SPREAD)
    return model


def counted(rollouts: list[Any]) -> Tensor:
    """How often each pair of tokens came, [V·V]."""
    pairs = torch.tensor([r.tokens for r in rollouts])
    return torch.bincount(pairs[:, 0] * VOCABULARY + pairs[:, 1], minlength=VOCABULARY**2).double()


@torch.no_grad()
def pair_probabilities(model: Any, top_p: float) -> Tensor:
    """Exact, from forward passes of the same weights in float64, [V·V]."""
    model = deepcopy(model).double()
    first = torch.arange(VOCABULARY, device=model.device)[:, None]
    ids = torch.cat([torch.tensor([PROMPT], device=model.device).repeat(VOCABULARY, 1), first], 1)
    logits_V2V = model(input_ids=ids, use_cache=False).logits[:, -2:].double()
    first_V = truncate(logits_V2V[:1, 0], top_p).softmax(-1)[0]
    second_VV = truncate(logits_V2V[:, 1], top_p).softmax(-1)
    return (first_V[:, None] * second_VV).flatten().cpu()


def p_value(counts_N: Tensor, probability_N: Tensor) -> float:
    """Pearson's chi-square test; a draw of what cannot be drawn has probability 0."""
    if bool((counts_N[probability_N == 0] > 0).any()):
        return 0.0
    expected_N = probability_N * counts_N.sum()
    common_N = expected_N >= FEWEST
    seen, wanted = counts_N[common_N], expected_N[common_N]
    rare, expected = counts_N[~common_N].sum(), expected_N[~common_N].sum()
    if expected > 0:
        seen, wanted = torch.cat([seen, rare[None]]), torch.cat([wanted, expected[None]])
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
