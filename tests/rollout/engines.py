"""What the tests of the native engine share."""

import torch

import tiny
from rpg.rollout import NativeEngine

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 9, 2, 8], [7, 8] * 6, [12, 13]]


def engine(model, slots=256, falls_back=False, **options):
    """By the way of decoding that is being tested: an engine that found it wrong and fell back would hide that."""
    made = NativeEngine(model, tiny.tokenizer(), slots, graphs=engine.graphs, **options)
    assert (made.decoder is not None) == (engine.graphs and not falls_back)
    return made


def forward_logp(model, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]


def flat(groups):
    return [rollout for group in groups for rollout in group]
