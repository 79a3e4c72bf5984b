"""A preset's metrics among verl's: means over the tokens of a mini-batch that rollout correction did not reject.

verl adds up the micro-batches and averages over ranks. So a micro-batch gives each mean times its share of the
mini-batch's tokens, and the sum of the shares beside them, by which the worker divides at the end of ``update_actor``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .losses import METRICS, Extra

WORKERS = "verl.workers.engine_workers"
KEPT = METRICS + "kept"  # of the tokens that verl divides by: 1 unless some were rejected


def of_micro_batch(extra: Extra, data: Any) -> dict[str, Any]:
    """verl's Metric of every number that the loss left in ``extra``."""
    from verl.utils.metric import AggregationType, Metric

    total = data["batch_num_tokens"]
    share = extra.tokens * data["dp_size"] / total if total else 1.0
    metrics = {KEPT: Metric(value=share, aggregation=AggregationType.SUM)}
    for name, value in extra.metrics.items():
        largest = _is_largest(name)
        aggregation = AggregationType.MAX if largest else AggregationType.SUM
        metrics[name] = Metric(value=value if largest else value * share if share else 0.0, aggregation=aggregation)
    return metrics


def over_kept(metrics: dict[str, list[float]]) -> None:
    """Numbers of mini-batches, in place: shares of all tokens become means over those kept."""
    kept = metrics.get(KEPT)
    if not isinstance(kept, list):  # an engine without data-parallel ranks, whose numbers verl has not yet added up
        return
    for name, values in metrics.items():
        if name.startswith(METRICS) and name != KEPT and not _is_largest(name) and len(values) == len(kept):
            metrics[name] = [x / share for x, share in zip(values, kept, strict=True) if share] or [0.0]


def _is_largest(name: str) -> bool:
    return "max" in name.rpartition("/")[2]


def install() -> None:
    """Before the reference's part, which reads the means."""
    follow("update_actor", "rpg_metrics", _after_update)


def _after_update(worker: Any, output: Any, *_: Any, **__: Any) -> Any:
    if output is not None:
        over_kept(output["metrics"])
    return output


def follow(name: str, mark: str, after: Callable[..., Any]) -> None:
    """Let a method of verl's worker end with ``after(worker, its output, *its arguments)``; once for each ``mark``."""
    workers = sys.modules.get(WORKERS)
    if workers is None:  # a process that has not imported it has no worker
        return
    theirs = getattr(workers.ActorRolloutRefWorker, name)
    if hasattr(theirs, mark):
        return

    @functools.wraps(theirs)  # with the attribute by which verl dispatches
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(self, theirs(self, *args, **kwargs), *args, **kwargs)

    setattr(method, mark, True)
    setattr(workers.ActorRolloutRefWorker, name, method)
