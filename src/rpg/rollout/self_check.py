"""An engine's first responses against the model's plain forward pass: one that computes something else is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .engine import Rollout


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
