"""Bias and noise of every choice on the page, from the audit: expected gradients, all responses enumerated."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ..audit.measure import Measurement, measure
from ..audit.problem import SCENARIOS, EnumeratedProblem
from ..audit.subjects import of_policy_loss
from ..audit.summary import bias_text
from ..console import two_digits
from ..loss import clip
from ..loss.objective import DIVERGENCES, LEVELS
from ..loss.policy_loss import PolicyLoss

SEEDS, BETA, DRIFT = 10, 0.1, 0.5  # as `rpg audit` has them
# What stays of a rule when its bounds are out of the way: the ratio itself, or what the rule has in its place.
RATIO = "w"
SHAPES: dict[str, clip.Clip | None] = {
    RATIO: None,
    "Unweighted": clip.Unweighted(),
    "Taper": clip.Taper(),
    "LogBox": clip.LogBox(),
    "Sigmoid": clip.Sigmoid(),
    "SoftWeight": clip.SoftWeight(),
    "through": clip.DualClip(),
}

Cells = list[list[str]]  # a row a scenario: bias, fixed and variable lengths, noise; the KL term's bias and noise


def key(shape: str, divergence: str, level: str, by_length: bool) -> str:
    return f"{shape} {divergence} {level}{' /|y|' if by_length else ''}"


def losses() -> dict[str, PolicyLoss]:
    """Every choice that has numbers of its own, by its key."""
    found = {}
    for shape, rule in SHAPES.items():
        through = shape == "through"
        for divergence in ("rkl", "urkl") if through else ("none", *DIVERGENCES):
            for level in LEVELS:
                for by_length in (False, True):
                    found[key(shape, divergence, level, by_length)] = PolicyLoss(
                        divergence,
                        BETA if divergence != "none" else 0.0,
                        "differentiable" if through else "reinforce",
                        rule,
                        level,
                        "seq-mean-token-mean" if by_length else "seq-mean-token-sum",
                        through_advantage=through,
                    )
    return found


def cells(loss: PolicyLoss, problems: dict[tuple[str, bool], list[EnumeratedProblem]]) -> Cells:
    """As the page shows them: medians over the problems, the clip open."""
    subject = of_policy_loss(loss, "")
    rows = []
    for scenario in SCENARIOS:
        fixed, variable = ([measure(subject, p) for p in problems[scenario, lengths]] for lengths in (False, True))
        biases = (bias_text(median(m.bias for m in each)) for each in (fixed, variable))
        rows.append([*biases, _middle(fixed, "variance"), _middle(fixed, "kl_bias"), _middle(fixed, "kl_variance")])
    return rows


def _middle(measured: list[Measurement], name: str) -> str:
    values = [v for m in measured if (v := getattr(m, name)) is not None]
    if not values:
        return "–"
    return bias_text(median(values)) if name == "kl_bias" else two_digits(median(values))


def problems() -> dict[tuple[str, bool], list[EnumeratedProblem]]:
    return {
        (scenario, variable): [
            EnumeratedProblem(scenario, variable, seed, beta=BETA, drift=DRIFT) for seed in range(SEEDS)
        ]
        for scenario in SCENARIOS
        for variable in (False, True)
    }


def table(progress: Callable[[str], None] = lambda _: None) -> dict[str, Cells]:
    """All of them: more than 300 audits, a minute and a half."""
    made = problems()
    found: dict[str, Cells] = {}
    for name, loss in losses().items():
        progress(f"{len(found) + 1}/{len(losses())}")
        found[name] = cells(loss, made)
    return found
