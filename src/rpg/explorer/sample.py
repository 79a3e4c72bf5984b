"""One sample under a loss: what the page computes at each ratio. Translated, as the loss is."""

from __future__ import annotations

from torch import Tensor

from ..loss.inputs import Inputs
from ..loss.policy_loss import PolicyLoss


def sample(logp: Tensor, log_w: float, log_v: float, advantage: float) -> Inputs:
    """A response of one token, logp [1,1]: at every level its ratio is w = π/old; v = ref/old."""
    old = logp.detach() - log_w
    one = logp.detach() * 0 + 1
    return Inputs(logp, old, old + log_v, None, one.sum(-1) * advantage, one, one.sum(-1), 1.0)


def loss_of(loss: PolicyLoss, x: Inputs) -> Tensor:
    """What ``PolicyLoss`` makes of it before the reduction. Its derivative by log π is the coefficient c."""
    terms = loss._terms(x, None, False)
    if loss.estimator == "reinforce":
        return -terms.omega().detach() * terms.ratios.logp
    return terms.differentiable()


def weight_of(loss: PolicyLoss, x: Inputs) -> float:
    """What is left of w: it multiplies A."""
    return float(loss._terms(x, None, False).weight.detach())


def fate_of(loss: PolicyLoss, x: Inputs) -> str:
    """What the clip does with it: "kept", "cut", or "held" at a limit."""
    if loss.clip is None:
        return "kept"
    terms = loss._terms(x, None, False)
    w, advantage = terms.ratios.w.detach(), terms.signed_advantage
    if loss.clip.action == "cut":
        return "kept" if float(loss.clip.keep(w, advantage, terms.seen)) else "cut"
    below, above = loss.clip.outside(w, advantage, terms.seen)
    return "held" if float(below) or float(above) else "kept"


def sentence(loss: PolicyLoss, x: Inputs, coefficient: float) -> str:
    """In plain words, what becomes of it. ``coefficient``: c = d loss / d log π."""
    terms = loss._terms(x, None, False)
    w, a, weight = float(terms.ratios.w.detach()), float(x.advantages), weight_of(loss, x)
    letter, it = "w", "the token"
    if loss.level != "token":
        letter, it = "W" if loss.level == "sequence" else "S", "the response"
    start = f"{letter} = {w:.3g}, A {'> 0' if a > 0 else '< 0'}: "
    fate = fate_of(loss, x)
    if coefficient == 0:
        return start + ("the clip cuts it: no gradient." if fate == "cut" else "no gradient.")
    to = f"{it} is made {'more' if coefficient < 0 else 'less'} likely"
    if fate == "cut":
        return f"{start}the clip cuts the reward; the KL term alone is left: {to}."
    counts = f"it counts {weight:.3g} times"
    if fate == "held":
        counts = f"the clip holds its weight at {weight:.3g} and keeps the gradient"
    if (coefficient < 0) != (a > 0):
        return f"{start}{counts}, and the KL term outweighs the reward: {to}."
    return f"{start}{counts}: {to}."
