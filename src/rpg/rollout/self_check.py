"""An engine that computes something else than the model is refused.

Its first responses are held against the model's plain forward pass, and attention over a cache in 8 bits against torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.decode import FP8, LEAST_SAMPLES, PAGE, LayerCache, launch, reference
from ..kernels.triton import has_triton
from .engine import Rollout

LARGEST_ERROR_IN_8_BITS = 0.03  # as a share: rounding to bfloat16 is a fifth of it


def check_engine(
    model: Any, generate: Callable[[list[list[int]]], list[list[Rollout]]], longest: int = 6, exact: bool = True
) -> None:
    """A ValueError if the log-probabilities of a few tokens are not the model's. Prompts have ``longest`` tokens.
    ``exact`` False: the engine rounds more than the model does."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[i % vocabulary for i in range(1, longest + 1)], [3 % vocabulary]]
    training = model.training
    model.eval()
    try:
        groups = zip(prompts, generate(prompts), strict=True)
        worst = max(_error(model, prompt, rollout) for prompt, rollouts in groups for rollout in rollouts)
    finally:
        model.train(training)
    full = exact and next(model.parameters()).dtype in (torch.float32, torch.float64)
    if not worst <= (0.02 if full else 0.5):
        raise ValueError(f"its log-probabilities are wrong by {worst:.2g}")


@torch.inference_mode()
def _error(model: Any, prompt: Sequence[int], rollout: Rollout) -> float:
    ids = torch.tensor([[*prompt, *rollout.tokens]], device=model.device)
    logp_TV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    logp_T = logp_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return float((logp_T - torch.tensor(rollout.logp)).abs().max())


def check_8_bits(layers: Sequence[LayerCache], dtype: torch.dtype) -> None:
    """A ValueError if the kernel over caches like these is wrong on their device: a few tokens would not show it."""
    store = layers[0].keys_CGTD
    if has_triton(store):
        for width in sorted({layer.keys_CGTD.shape[3] for layer in layers}):
            worst = error_in_8_bits(width, dtype, store.device)
            if not worst <= LARGEST_ERROR_IN_8_BITS:
                raise ValueError(
                    f"attention over a cache in 8 bits is wrong by {worst:.2g} on this device: "
                    "leave rollout.cache_dtype away"
                )


@functools.cache
@torch.inference_mode()
def error_in_8_bits(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """The kernel's largest error with heads of this width, as a share, against torch in float64.

    Some rows see one token, so that they give back its values: every number of 8 bits, at even and at odd places.
    Others see many, in the pages of a prompt and of their own. Each token has another scale.
    """
    generator = torch.Generator().manual_seed(0)
    code_N = torch.tensor([i for i in range(256) if i % 128 != 127], dtype=torch.uint8)  # 127 and 255 are no numbers
    alone, G = -(-2 * len(code_N) // width), 2
    A, C = alone + 4, 4 * (alone + 4)
    drawn = torch.randint(len(code_N), (2, C, G, PAGE, width), generator=generator)
    place = torch.arange(alone * width).view(alone, 1, width)
    drawn[1, 2 : 4 * alone : 4, :, 0] = (place // 2 + place % 2 * 127) % len(code_N)
    keys, values = (code_N[x].view(FP8) for x in drawn)
    scale_2CGT = 0.25 + torch.rand(2, C, G, PAGE, generator=generator)
    scale_2CGT[0] /= code_N.view(FP8).float().std()
    query_AGRD = torch.randn(A, G, 2, width, generator=generator)
    query_AGRD[:alone] = query_AGRD[:alone, :, :1]
    key_AGD, value_AGD = torch.randn(2, A, G, width, generator=generator)
    key_AGD[:alone] = -20 * query_AGRD[:alone, :, 0]  # of no weight beside the token that is seen alone
    given = query_AGRD.flatten(1, 2).to(dtype), key_AGD.to(dtype), value_AGD.to(dtype)
    page_A4, row_A = torch.arange(C, dtype=torch.int32).view(A, 4), torch.arange(A, dtype=torch.int32)
    shared_A, own_A = torch.tensor([*[(0, 1)] * alone, (1, 0), (64, 17), (100, 127), (128, 70)], dtype=torch.int32).T
    indices = page_A4[:, :2], page_A4[:, 2:], row_A, shared_A.contiguous(), row_A, own_A.contiguous()

    exact = LayerCache(keys.clone(), values.clone(), *scale_2CGT.double())
    query, key, value = (x.double() for x in given)
    prompt_pages, pages, prompt, shared, slot, own = indices
    want_AHD = reference(query, key, value, exact, prompt_pages, pages, prompt, shared, slot, own, width**-0.5)
    size_AHD = want_AHD.abs() + 1e-6
    size_AHD[alone:] += want_AHD[alone:].square().mean((1, 2), keepdim=True).sqrt()
    worst = 0.0
    query, key, value = (x.to(device) for x in given)
    prompt_pages, pages, prompt, shared, slot, own = (x.to(device) for x in indices)
    ways: list[dict[str, Any]] = [{"splits": 1}, {}, {"samples": LEAST_SAMPLES}]
    for settings in ways:
        cache = LayerCache(*(x.to(device, copy=True) for x in (keys, values, *scale_2CGT)))
        where = prompt_pages, pages, prompt, shared, slot, own
        found_AHD = launch(query, key, value, cache, *where, width**-0.5, **settings)
        errors = [float(((found_AHD.cpu() - want_AHD).abs() / size_AHD).max())]
        both = zip(cache.read(page_A4.long().to(device)), exact.read(page_A4.long()), given[1:], strict=True)
        errors += [float((found.cpu() - wanted).norm() / new.double().norm()) for found, wanted, new in both]
        worst = max([worst, *errors]) if all(map(math.isfinite, errors)) else math.inf
    return worst
