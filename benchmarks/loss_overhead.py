"""What PolicyLoss costs beside the same loss written by hand: forward and backward at [512, 1024], in one run.

    python benchmarks/loss_overhead.py [--device cuda] [--rows 512] [--tokens 1024] [--repeats 30]

The hand-written expression is what a practitioner would put into a trainer for this one method: no checks, no care for
NaN, no bounds, no other options. Both are timed in alternation and compared as the median of paired ratios, so that the
machine's noise falls on both. "with metrics" adds reading all diagnostics, as a trainer does once a minibatch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import rpg

BETA = 1e-2


def hand_reinforce_urkl(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor) -> Tensor:
    """RPG-REINFORCE-URKL with RPG-Style Clip, ref ≠ old."""
    with torch.no_grad():
        w = (logp - old).exp()
        a_reg = a.unsqueeze(-1) - BETA * (logp - ref)
        keep = torch.where(a_reg >= 0, w < 1.28, (w > 0.8) & (w < 10.0))
        weight = w * a_reg * keep * mask
    return -(weight * logp).sum() / mask.sum()


def hand_urkl(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor) -> Tensor:
    """RPG-URKL with dual clip (Algorithm 1)."""
    w = (logp - old).exp()
    a_reg = a.unsqueeze(-1) - BETA * (logp - ref)
    clipped = torch.max(-w * a_reg, -w.clamp(0.8, 1.28) * a_reg)
    loss = torch.where(a_reg < 0, torch.min(clipped, -10.0 * a_reg), clipped)
    return (loss * mask).sum() / mask.sum()


def hand_grpo(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor) -> Tensor:
    """GRPO as published: PPO clip, unweighted k3, 1/|y|."""
    w, a = (logp - old).exp(), a.unsqueeze(-1)
    kl = (ref - logp).exp() - (ref - logp) - 1
    loss = -torch.min(w * a, w.clamp(0.8, 1.2) * a) + BETA * kl
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def hand_dapo(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor) -> Tensor:
    """DAPO: PPO clip-higher, token mean."""
    w, a = (logp - old).exp(), a.unsqueeze(-1)
    return -(torch.min(w * a, w.clamp(0.8, 1.28) * a) * mask).sum() / mask.sum()


CASES: dict[str, Callable[..., Tensor]] = {
    "rpg-reinforce-urkl": hand_reinforce_urkl,
    "rpg-urkl": hand_urkl,
    "grpo": hand_grpo,
    "dapo": hand_dapo,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape, device = (args.rows, args.tokens), args.device
    old = -torch.rand(shape, device=device) * 3
    ref = old + 0.1 * torch.randn(shape, device=device)
    logp = (old + 0.1 * torch.randn(shape, device=device)).requires_grad_()
    advantages = torch.randn(args.rows, device=device)
    lengths = torch.randint(args.tokens // 4, args.tokens + 1, (args.rows, 1), device=device)
    mask = torch.arange(args.tokens, device=device) < lengths

    def timed(fn: Callable[[], Tensor]) -> tuple[float, Tensor]:
        logp.grad = None
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = fn()
        loss.backward()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start, logp.grad.clone()

    name_of_device = torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name_of_device}, {list(shape)} float32, median of {args.repeats} pairs")
    print(f"{'method':<22}{'by hand':>10}{'rpg':>10}{'ratio':>8}{'with metrics':>14}{'ratio':>8}   same gradient")
    for name, hand in CASES.items():
        loss_fn = rpg.algorithm(name, beta=BETA).loss if name != "dapo" else rpg.algorithm(name).loss
        ours = lambda: loss_fn(logp, old, advantages, mask, ref_logp=None if name == "dapo" else ref)  # noqa: E731

        def with_metrics() -> Tensor:
            out = ours()
            _ = out.metrics
            return out.loss

        by_hand = lambda: hand(logp, old, advantages, mask, ref)  # noqa: E731
        sides = {"hand": by_hand, "rpg": lambda: ours().loss, "metrics": with_metrics}
        times: dict[str, list[float]] = {side: [] for side in sides}
        gradients = {}
        for repeat in range(args.repeats + 3):
            for side, fn in sides.items():
                seconds, gradients[side] = timed(fn)
                if repeat >= 3:
                    times[side].append(seconds)
        error = float((gradients["rpg"] - gradients["hand"]).abs().max() / gradients["hand"].abs().max())
        medians = {side: statistics.median(t) * 1e3 for side, t in times.items()}
        ratio = {s: statistics.median(x / h for x, h in zip(times[s], times["hand"], strict=True)) for s in sides}
        print(
            f"{name:<22}{medians['hand']:>8.2f}ms{medians['rpg']:>8.2f}ms{ratio['rpg']:>8.2f}"
            f"{medians['metrics']:>12.2f}ms{ratio['metrics']:>8.2f}   {error:.1e}"
        )


if __name__ == "__main__":
    main()
