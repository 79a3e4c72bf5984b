"""Random settings of a loss, and what the library itself makes of them: one token, float64, autograd."""

import math
import random

import torch

from rpg import PolicyLoss, clip
from rpg.explorer.source import RULES
from rpg.loss.objective import DIVERGENCES, LEVELS
from rpg.loss.policy_loss import ESTIMATORS


def options(rng, rule):
    """Of a rule, anywhere in their ranges; now and then a bound is left out."""
    bound = lambda lowest, highest: None if rng.random() < 0.1 else rng.uniform(lowest, highest)  # noqa: E731
    match rule:
        case "Box" | "Truncate" | "LogBox":
            return {"low": bound(0, 0.99), "high": bound(0, 4)}
        case "DualClip" | "RPGClip":
            return {"low": bound(0, 0.9), "high": rng.uniform(0, 2), "c": bound(3.1, 12)}
        case "KL3":
            return {
                "delta": 10 ** rng.uniform(-4, 0.3),
                "form": rng.choice(clip.KL3_FORMS),
                "c": rng.choice([None, 60]),
            }
        case "TrustRegion":
            return {"delta": 10 ** rng.uniform(-2, 0), "measure": rng.choice(("tv", "kl", "kl-reverse"))}
        case "Sigmoid":
            return {"tau_positive": rng.uniform(0.2, 4), "tau_negative": rng.uniform(0.2, 4)}
        case "SoftWeight":
            names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
            return {name: rng.uniform(0.3, 4) for name in names}
    return {}


def random_setting(rng):
    """A state of the page that the library accepts, and a ratio and an advantage to look at."""
    while True:
        rule = rng.choice(("none", *RULES))
        state = {
            "divergence": rng.choice(("none", *DIVERGENCES)),
            "beta": rng.choice([1e-4, 10 ** rng.uniform(-3, 0.5)]),
            "estimator": rng.choice(ESTIMATORS),
            "level": rng.choice(LEVELS),
            "clip": rule,
            "options": options(rng, rule),
            "kl_in_clip": rng.choice([None, None, True, False]),
            "through_advantage": rng.random() < 0.2,
            "advantage": 10 ** rng.uniform(-2, 0.7),
            "log_v": rng.choice([0.0, rng.uniform(-1, 1)]),
            "p": rng.uniform(0.02, 0.5),
        }
        try:
            loss = library(state)
        except ValueError:
            continue
        log_w = rng.uniform(-2.5, 2.5)
        if isinstance(loss.clip, clip.TrustRegion):
            log_w = min(log_w, -math.log(state["p"]) - 1e-3)  # no probability is above 1
        return state, log_w, rng.choice([1, -1]) * state["advantage"]


def library(state):
    rule = None if state["clip"] == "none" else getattr(clip, state["clip"])(**state["options"])
    names = ("divergence", "beta", "estimator", "level", "kl_in_clip", "through_advantage")
    return PolicyLoss(clip=rule, **{name: state[name] for name in names})


def tensors(state, log_w, tokens=1):
    """logp (with a gradient), old and ref, [1,T], float64."""
    old = torch.full((1, tokens), math.log(state["p"]), dtype=torch.float64)
    return (old + log_w).requires_grad_(), old, old + state["log_v"]


def coefficient(state, log_w, advantage):
    """d loss / d log π of one token, by autograd through the library's own call."""
    logp, old, ref = tensors(state, log_w)
    mask = torch.ones_like(old, dtype=torch.bool)
    out = library(state)(logp, old, torch.tensor([advantage], dtype=torch.float64), mask, ref_logp=ref)
    (c,) = torch.autograd.grad(out.loss, logp)
    return float(c)


def thousand(seed=0, n=1000):
    rng = random.Random(seed)
    return [random_setting(rng) for _ in range(n)]
