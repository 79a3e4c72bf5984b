"""Warning lights: what the rows of metrics.jsonl said before runs fell apart. Numbers in, lines out; no run is stopped.

A light compares a row with rows of the same run shortly before, or with a bound in nats a token. Where the bounds come
from: docs/warning-lights.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

CALM = 5  # steps in a row without a reason, after which a light goes out

Series = list[float]


@dataclass(frozen=True)
class Light:
    name: str
    reads: str
    """a metric"""
    steps: int
    """of it that many values are looked at: the last ones"""
    reason: Callable[[Series], str | None]
    """what is to be seen in them, oldest first; None: nothing"""
    remedy: str


# ---- what is to be seen ----------------------------------------------------------------------------------------------


def backwards(shifts: Series) -> str | None:
    shift = min(shifts[-1], _mean(shifts))
    if shifts[-1] < -0.04 or _mean(shifts) < -0.015:
        return f"training on a batch made its better responses less likely, by {-shift:.2g} nats a token"
    return None


def drift(kls: Series) -> str | None:
    kl = max(kls[-1], _mean(kls))
    if kls[-1] > 0.06 or _mean(kls) > 0.04:
        return f"training on a batch moved the policy {kl:.2g} nats a token away from what it was sampled with"
    return None


def leaving(kls: Series) -> str | None:
    rise = (kls[-1] - kls[0]) / (len(kls) - 1) if len(kls) > 1 else kls[-1]
    if rise > 0.2:
        return f"the policy is {kls[-1]:.2g} nats a token away from its start, and goes {rise:.2g} a step"
    return None


def fallen(shares: Series) -> str | None:
    pairs = [(one + other) / 2 for one, other in pairwise(shares)]
    if pairs and (now := pairs[-1]) < 0.5 * (best := max(pairs)) and best - now > 0.1:
        return f"{now:.0%} of the training responses are right, after {best:.0%} in the last {len(shares)} steps"
    return None


def length(lengths: Series) -> str | None:
    before, now = lengths[0], lengths[-1]
    if now > 2 * before or now < before / 2:
        return f"responses went from {before:.0f} to {now:.0f} tokens within {len(lengths) - 1} steps"
    return None


def entropy(values: Series) -> str | None:
    before, now = values[0], values[-1]
    if now > 2 * before or now < before / 3:
        return f"entropy went from {before:.2g} to {now:.2g} nats a token within {len(values) - 1} steps"
    return None


def _mean(values: Series) -> float:
    """Of two; of one value alone nothing is said."""
    return statistics.fmean(values) if len(values) > 1 else 0.0


SMALLER = "Lower optim.lr, or take fewer optim.minibatches or optim.epochs"
HELD = f"{SMALLER}; or hold it: reference.update frozen and a larger loss.beta"
READ = "Read the last responses in samples.jsonl: does the reward pay for this?"
ENTROPY = "Lower optim.lr. Where it falls, raise the clip's upper bound; where it rises, lower an entropy bonus"
BACK = "See whether the reward pays for being right; else go back to an earlier checkpoint, with a lower optim.lr"
LIGHTS = (
    Light("backwards", "shift/good", 2, backwards, SMALLER),
    Light("drift", "kl/old_last", 2, drift, SMALLER),
    Light("leaving", "kl/start", 4, leaving, HELD),
    Light("length", "length/mean", 4, length, READ),
    Light("entropy", "entropy", 4, entropy, ENTROPY),
    Light("fallen", "reward/solved", 20, fallen, BACK),
)


# ---- a run's ---------------------------------------------------------------------------------------------------------


@dataclass
class Lights:
    """What is remembered of a run, as a checkpoint's ``state.json`` has it."""

    recent: dict[str, Series] = field(default_factory=dict)
    """of each light the last values of the metric that it reads"""
    calm: dict[str, int] = field(default_factory=dict)
    """of each light that is on: steps in a row in which it had no reason to be"""
    events: list[dict[str, Any]] = field(default_factory=list)
    """{"light", "step", "text", "until": the step in which it went out, or None}"""

    def see(self, step: int, row: dict[str, float]) -> list[str]:
        """A row of metrics, which gets ``light/NAME``, 0 or 1, of each light that can tell. What to say comes back: of
        each light that goes on one line. A step that was not trained on leaves a light as it is."""
        told = []
        for light in LIGHTS:
            value = row.get(light.reads)
            if value is not None and math.isfinite(value):
                values = [*self.recent.get(light.name, []), float(value)][-light.steps :]
                self.recent[light.name] = values
                if text := self._judge(light, step, light.reason(values)):
                    told.append(f"step {step}: {text}")
            if light.name in self.recent:
                row[f"light/{light.name}"] = float(light.name in self.calm)
        return told

    def _judge(self, light: Light, step: int, reason: str | None) -> str | None:
        """On, off or as before. The line to say if it goes on."""
        if reason is None:
            if light.name in self.calm:
                self._calm_down(light.name, step)
            return None
        new, self.calm[light.name] = light.name not in self.calm, 0
        if not new:
            return None
        text = f"{light.name}: {reason}. {light.remedy}"
        self.events.append({"light": light.name, "step": step, "text": text, "until": None})
        return text

    def _calm_down(self, name: str, step: int) -> None:
        self.calm[name] += 1
        if self.calm[name] >= CALM:
            del self.calm[name]
            next(event for event in reversed(self.events) if event["light"] == name)["until"] = step
