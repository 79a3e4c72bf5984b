"""A loss as a formula and as a few lines of torch, for every choice on the page. Translated, as the loss is."""

from __future__ import annotations

from ..loss.clip import KL3, Clip, LogBox, Sigmoid, SoftWeight, Taper, Truncate, TrustRegion, Unweighted
from ..loss.policy_loss import PolicyLoss

ENDLESS = 1e300  # as good as no limit
K3 = {
    "k3": "w - 1 - w.log()",
    "k3-inverse": "1 / w - 1 + w.log()",
    "k3-weighted": "1 - w + w * w.log()",
    "k2": "w.log().square() / 2",
}
FAR = {
    "tv": "(p - q).abs()",
    "kl": "p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()",
    "kl-reverse": "q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()",
}


# ---- plain torch -----------------------------------------------------------------------------------------------------


def code(loss: PolicyLoss, texts: dict[str, dict[str, str]]) -> str:
    """Plain torch with the loss's gradient: logp, old, ref, mask [B,T], A [B,1] (at the sequence levels [B]).
    ``texts``: each divergence's expressions, as they stand in the table."""
    lines: list[str] = []
    if loss.level != "token":
        length = " / mask.sum(-1)" if loss.level == "sequence-mean" else ""
        lines += [f"logp, old, ref = ((x * mask).sum(-1){length} for x in (logp, old, ref))"]
    lines += ["w = (logp - old).exp()"]
    place, kl, a = loss.kl_place, texts[loss.divergence], "A"
    if place != "none":
        used = kl["value"] + kl["weight"]
        lines += ["log_u = logp - ref"] if "log_u" in used else []
        lines += ["v = (ref - old).exp()"] if "v " in used or used == "v" else []
    if place == "whole sample" or place == "in the advantage":
        lines += [f"A_hat = A + {loss.beta:.10g} * ({kl['per_ratio']})"]
        a = "A_hat"
    if loss.clip is not None:
        lines += rule_code(loss.clip, a, loss.estimator)
    reinforce = loss.estimator == "reinforce"
    lines += reinforce_code(loss, place, kl) if reinforce else differentiable_code(loss, place, kl)
    return "\n".join([*lines, reduction_code(loss)])


def reduction_code(loss: PolicyLoss) -> str:
    """All tokens, or all responses, to one number."""
    if loss.level == "token":
        return {
            "token-mean": "loss = (loss * mask).sum() / mask.sum()",
            "seq-mean-token-mean": "loss = ((loss * mask).sum(-1) / mask.sum(-1)).mean()",
            "seq-mean-token-sum": "loss = (loss * mask).sum(-1).mean()",
            "constant": f"loss = (loss * mask).sum() / (len(mask) * {loss.constant or 1:.10g})",
        }[loss.reduction]
    return {
        "token-mean": "loss = loss.sum() / mask.sum()",
        "seq-mean-token-mean": "loss = (loss / mask.sum(-1)).mean()",
        "seq-mean-token-sum": "loss = loss.mean()",
        "constant": f"loss = loss.mean() / {loss.constant or 1:.10g}",
    }[loss.reduction]


def rule_code(clip: Clip, a: str, estimator: str) -> list[str]:
    """What the clip decides: ``keep``, or the weight ``w_bar`` in place of w."""
    if isinstance(clip, Unweighted):
        return ["w_bar = torch.ones_like(w)"]
    if isinstance(clip, Taper):
        return ["w_bar = torch.where(A >= 0, 1.0, w.clamp(max=1))"]
    if isinstance(clip, Truncate):
        return [f"w_bar = {clamp_code(clip.limits().positive[0], clip.limits().positive[1])}"]
    if isinstance(clip, SoftWeight):
        positive = f"w ** {clip.k_positive:.10g} * ({clip.lambda_positive:.10g} * (1 - w)).exp()"
        negative = f"w ** {clip.k_negative:.10g} * ({clip.lambda_negative:.10g} * (1 - w)).exp()"
        return [f"w_bar = torch.where(A >= 0, {positive}, {negative})"]
    if isinstance(clip, Sigmoid):
        tau = f"tau = torch.where(A > 0, {clip.tau_positive:.10g}, {clip.tau_negative:.10g})"
        gate = "gate = torch.sigmoid(tau * (w - 1))"
        return [tau, gate, "w_bar = 4 * gate * (1 - gate) * w" if estimator == "reinforce" else "S = 4 / tau * gate"]
    if isinstance(clip, TrustRegion):
        far = f"far = {FAR[clip.measure]} > {clip.delta:.10g}"
        return ["p, q = old.exp(), logp.exp()", far, f"keep = ~(far & torch.where({a} >= 0, w > 1, w < 1))"]
    if isinstance(clip, KL3):
        away = f"away = (w > 1) == ({a} >= 0)"
        dual = "" if clip.c is None else f" & (({a} >= 0) | (w < {clip.c:.10g}))"
        return [away, f"keep = ~(({K3[clip.form]} > {clip.delta:.10g}) & away){dual}"]
    limits = clip.limits()
    positive = inside_code(limits.positive[0], limits.positive[1])
    negative = inside_code(limits.negative[0], limits.negative[1])
    return [f"keep = torch.where({a} >= 0, {positive}, {negative})"]


def inside_code(low: float, high: float) -> str:
    tests: list[str] = []
    tests += [f"w > {low:.10g}"] if low > 0 else []
    tests += [f"w < {high:.10g}"] if high < ENDLESS else []
    if len(tests) == 2:
        return f"({tests[0]}) & ({tests[1]})"
    return tests[0] if len(tests) == 1 else "w > 0"


def clamp_code(low: float, high: float) -> str:
    if low > 0:
        return f"w.clamp({low:.10g}, {high:.10g})" if high < ENDLESS else f"w.clamp(min={low:.10g})"
    return f"w.clamp(max={high:.10g})" if high < ENDLESS else "w"


def left_code(loss: PolicyLoss) -> str:
    """What multiplies A in ω."""
    if loss.clip is None:
        return "w"
    if loss.clip.action == "truncate" or isinstance(loss.clip, Sigmoid):
        return "w_bar"
    return "keep" if isinstance(loss.clip, LogBox) else "w * keep"


def reinforce_code(loss: PolicyLoss, place: str, kl: dict[str, str]) -> list[str]:
    last = "loss = -omega.detach() * logp"
    if place == "none":
        return [f"omega = {left_code(loss)} * A", last]
    if place == "outside":
        return [f"omega = {left_code(loss)} * A + {loss.beta:.10g} * ({kl['weight']})", last]
    if place == "in the weight":
        uses = "log_u" in kl["weight"]
        inner = ["log_u = log_u - w.log() + w_bar.log()  # of the truncated ratio"] if uses else []
        return [*inner, "w = w_bar", f"omega = w * A + {loss.beta:.10g} * ({kl['weight']})", last]
    return ["omega = w * A_hat * keep", last]


def differentiable_code(loss: PolicyLoss, place: str, kl: dict[str, str]) -> list[str]:
    if place == "whole sample":
        whole = f"loss = -w * A + {loss.beta:.10g} * ({kl['value']})"
        return [whole, "loss = torch.where(keep, loss, loss.detach())"]
    if loss.clip is None:
        surrogate = "w"
    elif place == "in the advantage":
        limits = loss.clip.limits()
        positive = clamp_code(limits.positive[0], limits.positive[1])
        negative = clamp_code(limits.negative[0], limits.negative[1])
        held = f"held = torch.where(A_hat >= 0, {positive}, {negative})"
        return [held, "loss = -torch.where(keep, w, held.detach()) * A_hat  # the gradient flows through A_hat too"]
    elif isinstance(loss.clip, Sigmoid):
        surrogate = "S"
    elif isinstance(loss.clip, LogBox):
        surrogate = "torch.where(keep, w, w.detach()).log()"
    else:
        surrogate = "torch.where(keep, w, w.detach())"
    penalty = f" + {loss.beta:.10g} * ({kl['value']})" if place == "outside" else ""
    return [f"loss = -{surrogate} * A{penalty}"]


# ---- the formula -----------------------------------------------------------------------------------------------------


def formula(loss: PolicyLoss, texts: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    """The loss of a sample, line by line. ``texts``: by level, each divergence's expressions as formulas."""
    w = {"token": "w", "sequence": "W", "sequence-mean": "S"}[loss.level]
    ratio = {
        "token": "w = π/old, of a token",
        "sequence": "W = ∏ π/old, over the tokens of a response; each of them is given ω",
        "sequence-mean": "S = (∏ π/old)^(1/|y|), the mean over a response; each of its tokens is given ω/|y|",
    }[loss.level]
    place, kl, clipped = loss.kl_place, texts[loss.level][loss.divergence], w
    if loss.clip is not None:
        clipped = f"clip({w})" if loss.clip.action == "cut" else f"{w}̄"
    beta = f"{loss.beta:.4g}"
    omega, regularised = f"ω = {clipped}·A", [""]
    if place == "outside":
        omega = f"ω = {clipped}·A + {beta}·({kl['weight']})"
    elif place == "in the weight":
        omega = f"ω = {w}̄·A + {beta}·({kl['weight']}),  with {w}̄ for {w} everywhere"
    elif place != "none":
        through = f" − {beta}·clip({w})" if place == "in the advantage" else ""
        omega = f"ω = {w}·Â where the clip keeps it, else 0{through}"
        regularised = [f"Â = A + {beta}·({kl['per_ratio']})"]
    first = "L = −sg(ω)·log π"
    if loss.estimator == "differentiable":
        penalty = f" + {beta}·({kl['value']})" if place == "outside" or place == "whole sample" else ""
        first = f"L = −{clipped}·A{penalty}"
        if place == "whole sample":
            first = f"L = −{w}·A{penalty}, cut as a whole"
        if place == "in the advantage":
            first = f"L = −clip({w})·Â, differentiated through Â too"
        omega += "   (= −dL/d log π)"
    return [line for line in [first, omega, *regularised, *rule_lines(loss, w), ratio] if line]


def rule_lines(loss: PolicyLoss, w: str) -> list[str]:
    """Where the clip lets a sample learn, or what it weighs."""
    clip = loss.clip
    if clip is None:
        return []
    sign = "Â" if loss.kl_place == "whole sample" or loss.kl_place == "in the advantage" else "A"
    if isinstance(clip, Unweighted):
        return [f"{w}̄ = 1"]
    if isinstance(clip, Taper):
        return [f"{w}̄ = 1 for A ≥ 0, min({w}, 1) for A < 0"]
    if isinstance(clip, SoftWeight):
        positive = f"{w}^{clip.k_positive:.4g}·e^({clip.lambda_positive:.4g}(1 − {w})) for A ≥ 0"
        return [f"{w}̄ = {positive}, {w}^{clip.k_negative:.4g}·e^({clip.lambda_negative:.4g}(1 − {w})) for A < 0"]
    if isinstance(clip, Sigmoid):
        taus = f"τ = {clip.tau_positive:.4g} for A > 0, else {clip.tau_negative:.4g}"
        return [f"clip({w}) = (4/τ)·sigmoid(τ({w} − 1)), {taus}"]
    if isinstance(clip, TrustRegion):
        measure = {"tv": "|π − old|", "kl": "KL(old‖π)", "kl-reverse": "KL(π‖old)"}[clip.measure]
        return [f"kept: {measure} ≤ {clip.delta:.4g}, or a step along {sign} leads back to old"]
    limits = clip.limits()
    if clip.action == "truncate":
        return [f"{w}̄ = {w} held within {ends(limits.positive[0], limits.positive[1], w)}"]
    positive = ends(limits.positive[0], limits.positive[1], w)
    return [f"kept: {positive} for {sign} ≥ 0,  {ends(limits.negative[0], limits.negative[1], w)} for {sign} < 0"]


def ends(low: float, high: float, w: str) -> str:
    below = f"{low:.5g} < " if low > 0 else ""
    above = f" < {high:.5g}" if high < ENDLESS else ""
    return f"{below}{w}{above}" if low > 0 or high < ENDLESS else f"any {w}"
