"""summary.json: what a run was, how far it got, and how good it became."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..models.policy import Policy
from ..run.config import Config
from .progress import Progress


def summarise(
    config: Config,
    folder: Path,
    task: str,
    sets: Iterable[str],
    policy: Policy,
    progress: Progress,
    status: str,
    message: str,
    stopped_by: str | None,
) -> dict[str, Any]:
    """``folder`` is the run's; ``sets`` are those that it is evaluated on; ``stopped_by``: a signal, or its minutes."""
    summary: dict[str, Any] = {
        "name": folder.name,
        "folder": str(folder),
        "algorithm": config.algorithm,
        "model": config.model,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "task": task,
        "seed": config.seed,
        "device": str(policy.device),
        "steps": config.steps,
        "step": progress.step,
        "status": status,
        "message": message,
        "stopped_by": stopped_by,
        "started": progress.started,
        "seconds": progress.total_seconds(),
        "tokens_total": progress.tokens_total,
        "peak_memory_gb": peak_memory_gb(),
        "peak_gpu_memory_gb": gpu_peak_memory_gb(policy.device),
        "reward_failures": progress.cursor.failures,
        "eval": {},
        "versions": {
            "rpg": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    for name in sets:
        scores = [{"step": e["step"], **e["sets"][name]} for e in progress.evals if name in e["sets"]]
        if not scores:
            continue
        last, best = scores[-1], best_of(scores)
        summary["eval"][name] = {
            "metric": f"mean@{config.eval.k}",
            "first": scores[0]["mean"],
            "last": last["mean"],
            "last_step": last["step"],
            "last_low": last["low"],
            "last_high": last["high"],
            "best": best["mean"],
            "best_step": best["step"],
        }
    return summary


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
    on_gpu = gpu_peak_memory_gb(device)
    return {"memory/peak_gb": peak_memory_gb()} | ({} if on_gpu is None else {"memory/gpu_peak_gb": on_gpu})


def starvation(steps: int, unequal: str, failed: str | None) -> str:
    """Why a run without a signal ends; ``failed`` is what is wrong with the reward functions, if anything is."""
    why = failed or (
        "If all are solved the task is done; if none are, it is too hard for this model: try easier problems, more "
        "rollout.samples or a higher rollout.temperature"
    )
    return f"for {steps} steps no group had {unequal}, so there is nothing to learn. {why}"
