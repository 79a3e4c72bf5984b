"""What PolicyLoss costs beside the same loss written by hand: forward and backward at [512, 1024], in one run.

    python benchmarks/loss_overhead.py [--device cuda] [--rows 512] [--tokens 1024] [--repeats 30]

"by hand" is the method's plain form (rpg.loss.methods), what a practitioner would put into a trainer for this one
method: no checks, no care for NaN, no bounds, no other options. Both are timed in alternation and compared as the
median of paired ratios, so that the machine's noise falls on both. "+ metrics" adds reading all diagnostics, as a
trainer does once a minibatch; "TRL" is GRPOTrainer._compute_loss itself, of the TRL installed (the extra
audit), with the metrics that it logs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

import rpg
from rpg.loss.registry import plain_form

METHODS = ("rpg-reinforce-urkl", "rpg-urkl", "grpo", "dapo")


def trl_loss(name: str, logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, ref: Tensor) -> Callable[[], Tensor] | None:
    """TRL's own loss of that name on the same tensors, or None."""
    if name not in ("grpo", "dapo") or importlib.util.find_spec("trl") is None:
        return None
    from trl import GRPOConfig, GRPOTrainer

    from rpg.audit.peers import _field_defaults, _trl_inputs, _trl_trainer

    config = _field_defaults(GRPOConfig)
    config.loss_type, config.beta, config.use_bias_correction_kl = name, rpg.algorithm(name).loss.beta, False
    config.epsilon_high = 0.28 if name == "dapo" else 0.2
    trainer = _trl_trainer(GRPOTrainer, config, True, logp)
    inputs = _trl_inputs(
        SimpleNamespace(tokens_NT=torch.zeros_like(mask, dtype=torch.long), mask_NT=mask, advantages_N=a)
    )
    inputs = {k: v.to(logp.device) for k, v in inputs.items()} | {
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    return lambda: trainer._compute_loss(None, inputs)


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
        seconds = time.perf_counter() - start
        assert logp.grad is not None
        return seconds, logp.grad.clone()

    on = torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {on}, {list(shape)} float32, forward and backward, median of {args.repeats} pairs"
    )
    print(f"{'method':<20}{'by hand':>9}{'rpg':>9}{'ratio':>7}{'+ metrics':>11}{'TRL':>9}   {'gradient error':<14}")
    for name in METHODS:
        tensors = (logp, old, advantages, mask)
        ours = partial(rpg.algorithm(name).loss, *tensors, ref_logp=None if name == "dapo" else ref)
        hand = partial(plain_form(name), logp, old, ref, advantages.unsqueeze(-1), mask)

        def with_metrics(ours: Callable[[], rpg.LossOutput] = ours) -> Tensor:
            out = ours()
            assert out.metrics
            return out.loss

        sides: dict[str, Callable[[], Tensor]] = {"hand": hand}
        sides["rpg"] = lambda ours=ours: ours().loss
        sides["metrics"] = with_metrics
        if trl := trl_loss(name, *tensors, ref):
            sides["trl"] = trl
        times: dict[str, list[float]] = {side: [] for side in sides}
        gradients: dict[str, Tensor] = {}
        for repeat in range(args.repeats + 3):
            for side, fn in sides.items():
                seconds, gradients[side] = timed(fn)
                if repeat >= 3:
                    times[side].append(seconds)
        median = {side: f"{statistics.median(t) * 1e3:.2f}ms" for side, t in times.items()}
        ratio = statistics.median(x / h for x, h in zip(times["rpg"], times["hand"], strict=True))
        error = max(float((g - gradients["rpg"]).abs().max() / g.abs().max()) for g in gradients.values())
        print(
            f"{name:<20}{median['hand']:>9}{median['rpg']:>9}{ratio:>7.2f}{median['metrics']:>11}"
            f"{median.get('trl', '-'):>9}   {error:.1e}"
        )


if __name__ == "__main__":
    main()
