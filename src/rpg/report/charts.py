"""Which curves are drawn, and what to look for in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from .runs import RunData


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    caption: str
    series: dict[str, str]
    """metric -> its name in the legend"""
    unit: str = "number"
    """number, share (shown in %) or seconds"""
    stacked: bool = False
    """parts of a whole, where there is one run"""
    whole: str = ""
    """with stacked: the metric that the parts add up to, drawn where there are several runs"""
    quiet: tuple[str, ...] = ()
    """curves that are off at first: they would squash the others"""
    begins: str = ""
    """instead of series: every metric whose name begins so"""


CHARTS = (
    Chart(
        "lights",
        "Warning lights",
        "1 while a light is on. The lines at the top of the page say what each saw, and what to try.",
        {},
        begins="light/",
    ),
    Chart(
        "reward",
        "Reward",
        "Mean reward of the training responses. If it rises while held-out accuracy does not, the policy memorises "
        "prompts or has found a hole in the reward.",
        {"reward/mean": "mean", "reward/std": "std"},
        quiet=("reward/std",),
    ),
    Chart(
        "parts",
        "Parts of the reward",
        "Mean of each part, before its weight. A part that rises alone is easier than the task: see whether the "
        "answers follow.",
        {},
        begins="reward/part/",
    ),
    Chart(
        "sources",
        "Solved, by dataset",
        "Share of the training responses that are right, for each part of a mixture.",
        {},
        "share",
        begins="reward/solved/",
    ),
    Chart(
        "groups",
        "Groups without a signal",
        "Groups in which all responses, or none, were right. With a group baseline these teach nothing: when both "
        "shares grow, the batch that is left to learn from shrinks.",
        {"groups/all_solved": "all solved", "groups/none_solved": "none solved"},
        "share",
    ),
    Chart(
        "entropy",
        "Entropy",
        "Nats per token. A slow fall is learning; a fall to almost zero early on ends exploration, and a steep rise "
        "is often the first sign of collapse.",
        {"entropy": "entropy"},
    ),
    Chart(
        "length",
        "Response length",
        "Tokens. Growth without growing accuracy is padding; a mean that nears the limit makes truncation, not "
        "reasoning, decide the reward.",
        {"length/mean": "mean", "length/max": "longest"},
        quiet=("length/max",),
    ),
    Chart(
        "truncated",
        "Truncated responses",
        "Share of responses cut at the token limit before they could end. What the limit costs in reward is at most "
        "this; if it grows with length, raise the limit or penalise length.",
        {"length/truncated": "truncated"},
        "share",
    ),
    Chart(
        "kl",
        "KL divergence",
        "Nats per token: to the sampling policy (old), so how far off-policy a step goes, and to the KL term's "
        "anchor (ref). A jump in old comes before most instabilities.",
        {"kl/old": "old", "kl/ref": "ref"},
    ),
    Chart(
        "clip",
        "Clipped",
        "Share of samples past each bound. Near zero, the clip does nothing; a share that keeps growing says that "
        "steps are too large or rollouts are reused too often.",
        {"clip/low": "low", "clip/high": "high", "clip/dual": "dual"},
        "share",
    ),
    Chart(
        "ratio",
        "Importance ratios",
        "Quantiles of π/μ. They should stay around 1; a tail that runs away makes a few tokens carry the "
        "whole gradient.",
        {"ratio/p01": "1 %", "ratio/p50": "median", "ratio/p99": "99 %", "ratio/max": "largest"},
        quiet=("ratio/max",),
    ),
    Chart(
        "ess",
        "Effective sample size",
        "Of the importance weights, as a share of the samples. 100 % is on-policy; at 50 % the gradient is as noisy as "
        "that of half the batch.",
        {"ess": "ESS"},
        "share",
    ),
    Chart(
        "lag",
        "Lag",
        "Steps of training between the draw of a token and its use. What it costs is in the effective sample size: a "
        "lag that grows while that falls says that sampling runs too far ahead, or that groups serve too long.",
        {"lag/mean": "mean", "lag/max": "largest"},
        quiet=("lag/max",),
    ),
    Chart(
        "dropped",
        "Groups dropped",
        "Groups that the policy had left too far to learn from. Many of them are sampling done for nothing.",
        {"worth/dropped": "dropped"},
    ),
    Chart(
        "sampled",
        "Groups sampled for one",
        "For each new group trained on. Above 1, problems without a signal or dropped groups took the rest.",
        {"groups/sampled_for_one": "sampled for one"},
    ),
    Chart(
        "grad",
        "Gradient norm",
        "Before it is scaled down to the limit. Lone spikes are caught by the limit; a trend upward is not.",
        {"grad_norm": "norm"},
    ),
    Chart(
        "mismatch",
        "Sampler against trainer",
        "The engine's log-probabilities beside the trainer's for the same tokens. This should be rounding; if it "
        "grows, the samples come from another policy than the one being trained.",
        {"mismatch/kl": "KL", "mismatch/max_log_ratio": "largest |log ratio|"},
        quiet=("mismatch/max_log_ratio",),
    ),
    Chart(
        "time",
        "Time per step",
        "Seconds, by part. Rollouts that take ever longer usually follow response length.",
        {
            "time/rollout": "rollout",
            "time/reward": "reward",
            "time/train": "train",
            "time/offload": "moving to and from the host",
            "time/eval": "eval",
            "time/checkpoint": "checkpoint",
        },
        "seconds",
        stacked=True,
        whole="time/step",
    ),
)
TRAINING_ACCURACY = "reward/solved"


def present(runs: Iterable[RunData]) -> tuple[Chart, ...]:
    """The charts, and in them the curves, that some run has a finite number for."""
    names = {name: None for run in runs for name, x in run.rows.columns.items() if np.isfinite(x).any()}
    cut = (replace(c, series=_series(c, names)) for c in CHARTS)
    return tuple(chart for chart in cut if chart.series)


def _series(chart: Chart, names: Iterable[str]) -> dict[str, str]:
    """Of these names, the chart's own."""
    if chart.begins:
        return {name: name.removeprefix(chart.begins) for name in names if name.startswith(chart.begins)}
    return {name: text for name, text in chart.series.items() if name in set(names)}
