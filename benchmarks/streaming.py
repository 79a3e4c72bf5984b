"""How much of the slots' time decodes, where lengths have a long tail: a step that waits for its last response, and
sampling that runs ahead.

    python benchmarks/streaming.py [--slots 128] [--steps 8]

The model is made up: at each position it ends a response with the hazard of a log-normal length (spread 1, median 48),
whatever was said before. So the engine's own sampling draws log-normal lengths. Responses are as many as slots: a step
has 16 prompts with 8 responses for 128 slots. Counted are decoding steps, not seconds: a slot's time is a step.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from typing import Any

import torch
import transformers

from rpg.rollout import NativeEngine, Sampling
from rpg.rollout.flight import Underway

END, MEDIAN, SPREAD, LONGEST, PROMPT, SAMPLES = 1, 48.0, 1.0, 1024, [2, 3, 4, 5], 8


def hazard(age: torch.Tensor) -> torch.Tensor:
    """Of a length of ``age`` + 1 tokens, when it is longer than ``age``."""

    def survives(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.erfc((x.clamp(min=1e-9) / MEDIAN).log() / (SPREAD * math.sqrt(2)))

    now, then = survives(age.double()), survives(age.double() + 1)
    return (1 - then / now.clamp(min=1e-300)).clamp(1e-9, 1 - 1e-9)


class LogNormalLengths(transformers.LlamaForCausalLM):
    """A Llama whose head says when to end by the position alone."""

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        out = super().forward(*args, position_ids=position_ids, **options)
        ids = options.get("input_ids", args[0] if args else None)
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1])[None].expand(ids.shape)
        if out.logits.shape[1] != position_ids.shape[1]:  # of each row's last token alone
            position_ids = position_ids.expand(len(ids), -1)
            last = (ids != 0).sum(-1) - 1 if ids.shape[1] > 1 else torch.zeros(len(ids), dtype=torch.long)
            position_ids = position_ids.gather(1, last[:, None])
        ends = hazard((position_ids + 1 - len(PROMPT)).clamp(min=0)).to(out.logits.dtype)
        logits = torch.full_like(out.logits, -30.0)
        logits[..., END], logits[..., 3] = ends.log(), (-ends).log1p()
        out.logits = logits
        return out


def model() -> LogNormalLengths:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, pad_token_id=0, bos_token_id=2, eos_token_id=END,
    )  # fmt: skip
    return LogNormalLengths(config).eval()


def waiting(engine: NativeEngine, prompts: int, steps: int) -> tuple[float, int, int]:
    """Every step samples its own responses, to the last one."""
    busy, tokens, decoding = 0.0, 0, 0
    for step in range(steps):
        groups = engine.generate([PROMPT] * prompts, SAMPLES, LONGEST, seed=step)
        rows = sum(len(rollout.tokens) for group in groups for rollout in group)
        longest = max(len(rollout.tokens) for group in groups for rollout in group)
        busy, tokens, decoding = busy + rows, tokens + rows, decoding + longest
    return tokens / (decoding * engine.slots), tokens, decoding


def ahead(engine: NativeEngine, prompts: int, steps: int, by: float) -> tuple[float, int, int]:
    """A step takes the groups that end first; the others go on."""
    under_way: list[Underway] = []
    number, taken, tokens, decoding = 0, deque[Underway](), 0, 0.0
    for step in range(steps):

        def feed(over: list[Underway], open_groups: int) -> list[Underway] | None:
            nonlocal number
            taken.extend(over)
            if len(taken) >= prompts:
                return None
            more = max(0, math.ceil(prompts * (1 + by)) - open_groups)
            number += more
            return [Underway.begin(i, PROMPT, i, SAMPLES) for i in range(number - more, number)]

        before = sum(len(part.tokens) for group in under_way for part in group.parts)
        done = len(taken)
        under_way = engine.decode(under_way, SAMPLES, Sampling(LONGEST), feed, version=step, keep_cache=True)
        new = sum(len(part.tokens) for group in [*under_way, *list(taken)[done:]] for part in group.parts) - before
        tokens, decoding = tokens + new, decoding + new / (engine.busy * engine.slots)
        for _ in range(min(prompts, len(taken))):
            taken.popleft()
    return tokens / (decoding * engine.slots), tokens, round(decoding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    prompts = args.slots // SAMPLES
    engine = NativeEngine(model(), None, args.slots, end_ids=[END])
    rows = [("waits for the last response", waiting(engine, prompts, args.steps))]
    rows += [(f"rollout.ahead {by:g}", ahead(engine, prompts, args.steps, by)) for by in (1, 2, 4)]
    print(f"{args.slots} slots, {prompts} × {SAMPLES} responses a step, {args.steps} steps, at most {LONGEST} tokens")
    print(f"{'':30}{'slot-time':>10}{'tokens':>10}{'decoding steps':>16}")
    for name, (share, tokens, decoding) in rows:
        print(f"{name:30}{share:>10.1%}{tokens:>10,}{decoding:>16,}")


if __name__ == "__main__":
    main()
