"""summary.json: what a run was, how far it got, and how good it became."""

from __future__ import annotations

import platform
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers

from .. import __version__

if TYPE_CHECKING:
    from .loop import Trainer


def summarise(run: Trainer, status: str, message: str) -> dict[str, Any]:
    config = run.config
    found: dict[str, Any] = {
        "name": run.folder.name,
        "algorithm": config.algorithm,
        "model": config.model,
        "parameters": sum(p.numel() for p in run.policy.model.parameters()),
        "task": run.task.name,
        "seed": config.seed,
        "device": str(run.policy.device),
        "steps": config.steps,
        "step": run.done,
        "status": status,
        "message": message,
        "stopped_by": run.stop.by if status == "stopped" else None,
        "started": run.started,
        "seconds": run.seconds(),
        "tokens_total": run.tokens_total,
        "peak_memory_gb": peak_memory_gb(),
        "peak_gpu_memory_gb": gpu_peak_memory_gb(run.policy.device),
        "reward_failures": run.collector.cursor.failures,
        "eval": {},
        "versions": {
            "rpg": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    for name in run.problems if run.evals else ():
        scores = [{"step": e["step"], **e["sets"][name]} for e in run.evals if name in e["sets"]]
        if not scores:
            continue
        last, best = scores[-1], best_of(scores)
        found["eval"][name] = {
            "metric": f"mean@{config.eval.k}",
            "first": scores[0]["mean"],
            "last": last["mean"],
            "last_low": last["low"],
            "last_high": last["high"],
            "best": best["mean"],
            "best_step": best["step"],
        }
    return found


def best_of(evals: list[dict[str, Any]]) -> dict[str, Any]:
    """The best evaluation; of equals the latest."""
    return max(evals, key=lambda e: (e["mean"], e["step"]))


def peak_memory_gb() -> float:
    """Of this process, in host memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def gpu_peak_memory_gb(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def memory_metrics(device: torch.device) -> dict[str, float]:
    found = {"memory/peak_gb": peak_memory_gb(), "memory/gpu_peak_gb": gpu_peak_memory_gb(device)}
    return {name: value for name, value in found.items() if value is not None}
