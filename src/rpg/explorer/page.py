"""The page: the library's losses in JavaScript, the presets, the audit's numbers, and what it takes to see them."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from dataclasses import MISSING, fields
from html import escape
from typing import Any

from .. import report
from ..audit.problem import SCENARIOS
from ..console import tag
from ..loss import clip
from ..loss.describe import advantage_text
from ..loss.methods import Algorithm, algorithm, algorithms
from ..loss.objective import DIVERGENCES
from ..loss.policy_loss import PolicyLoss
from . import numbers
from .numbers import Cells
from .source import RULES, expressions, formulas, read, script

# The buttons. The others are in the list beside them.
BUTTONS = {
    "Published": ("ppo", "grpo", "grpo-corrected", "dapo", "cispo", "gspo", "dppo-tv", "dppo-kl", "rloo", "sapo"),
    "RPG": ("rpg-fkl", "rpg-ufkl", "rpg-rkl", "rpg-urkl"),
    "RPG-Style Clip": ("rpg-reinforce-fkl", "rpg-reinforce-ufkl", "rpg-reinforce-rkl", "rpg-reinforce-urkl"),
}
CLIPS = {  # clips by themselves, around a loss without a KL term
    **{f"KL3: {form}": clip.KL3(0.05, form) for form in clip.KL3_FORMS},
    "dual clip": clip.DualClip(0.2, 0.2, 3.0),
}


def html(table: dict[str, Cells]) -> str:
    """``table``: what ``numbers.table`` gives."""
    code = "'use strict';\n{\n" + script() + "\n" + read("chart.js", report.__name__) + read("page.js") + "}\n"
    title = "What a loss does with one token"
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(code)}">',
        '<link rel="icon" href="data:,">',
        tag("title", title),
        tag("style", read("page.css")),
    )
    data = json.dumps(payload(table), ensure_ascii=False).replace("<", "\\u003c")
    body = [
        _header(title),
        tag("main", *_controls(), _pictures()),
        _footer(),
        tag("script", data, type="application/json", id="data"),
        tag("script", code),
    ]
    return "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"


def numbers_of(page: str) -> dict[str, Cells]:
    """The audit's numbers that stand in a page."""
    data = page.partition('id="data">')[2].partition("</script>")[0]
    table: dict[str, Cells] = json.loads(data)["numbers"]
    return table


def _policy(code: str) -> str:
    """The page loads nothing and runs this one script."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


# ---- what the script reads ------------------------------------------------------------------------------------------


def payload(table: dict[str, Cells]) -> dict[str, Any]:
    presets = {name: preset for name in algorithms() if (preset := _preset(algorithm(name)))}
    return {
        "presets": {**presets, **{name: _clip_alone(name, rule) for name, rule in CLIPS.items()}},
        "rules": {"none": {"about": "every sample keeps its weight", "options": []}} | {n: _rule(n) for n in RULES},
        "texts": expressions(),
        "formulas": formulas(),
        "numbers": table,
        "scenarios": dict(SCENARIOS),
        "shapes": list(numbers.SHAPES),
    }


def _preset(a: Algorithm) -> dict[str, Any] | None:
    """A preset as a state of the page; None where one token by itself does not show what it is."""
    loss = a.loss
    extra = loss.token_clip or loss.gate or loss.kl_ratio_cap or loss.length_weighted or "keep" in loss.needs
    if extra or loss.has_bonus or a.advantage.kind == "zero":
        return None
    return {
        "state": _state(loss),
        "about": a.formula.replace("``", ""),
        "paper": a.paper,
        "advantage": advantage_text(a.advantage),
    }


def _clip_alone(name: str, rule: clip.Clip) -> dict[str, Any]:
    about = (inspect.getdoc(type(rule)) or "").split("\n\n")
    text = " ".join(about[0].split())
    state = _state(PolicyLoss("none", 0.0, "differentiable", rule))
    paper = "arXiv 2602.05494" if isinstance(rule, clip.KL3) else "arXiv 1912.09729"
    return {"state": state, "about": text, "paper": paper, "advantage": ""}


def _state(loss: PolicyLoss) -> dict[str, Any]:
    options = {f.name: getattr(loss.clip, f.name) for f in fields(loss.clip)} if loss.clip else {}  # type: ignore[arg-type]
    return {
        "divergence": loss.divergence,
        "beta": loss.beta,
        "estimator": loss.estimator,
        "clip": type(loss.clip).__name__ if loss.clip else "none",
        "options": options,
        "kl_in_clip": loss.kl_in_clip,
        "through_advantage": loss.through_advantage,
        "level": loss.level,
        "reduction": loss.reduction,
        "constant": loss.constant,
    }


def _rule(name: str) -> dict[str, Any]:
    """A clip's first sentence, and its options: a number, a number or nothing, or one of a few words."""
    rule = getattr(clip, name)
    words = {"form": list(clip.KL3_FORMS), "measure": [m for m in clip.MEASURES if m != "state-kl"]}
    options = [
        {"name": f.name, "default": f.default, "none": "None" in str(f.type), "words": words.get(f.name)}
        for f in fields(rule)
        if f.default is not MISSING
    ]
    about = " ".join((inspect.getdoc(rule) or "").split("\n\n")[0].split()).replace("``", "")
    return {"about": about, "options": options}


# ---- what stands on it ----------------------------------------------------------------------------------------------


def _header(title: str) -> str:
    lede = (
        "A response is sampled from an older policy; the policy has moved since. <b>w</b> = π/old says how much more "
        "likely a token is now. <b>A</b> says whether its response was better than the others. From these two a "
        "method decides how hard to push. Pick one, point at a curve, and read."
    )
    groups = []
    for group, names in {**BUTTONS, "Clips alone": tuple(CLIPS)}.items():
        buttons = (tag("button", escape(n), type="button", data_preset=n, aria_pressed="false") for n in names)
        groups.append(tag("div", tag("span", group, class_="group"), *buttons, role="group", aria_label=group))
    others = [n for n in algorithms() if _preset(algorithm(n)) and not any(n in b for b in BUTTONS.values())]
    choices = "".join(tag("option", escape(n), value=n) for n in others)
    more = tag("select", tag("option", "more presets …", value=""), choices, id="more", aria_label="More presets")
    groups.append(tag("div", more))
    about = tag("p", id="about", aria_live="polite")
    return tag(
        "header",
        tag("p", "rpg explorer", class_="kicker"),
        tag("h1", title),
        tag("p", lede, class_="lede"),
        tag("noscript", tag("p", "This page is drawn by the losses themselves, in JavaScript, which is switched off.")),
        tag("nav", *groups, class_="presets", aria_label="Methods"),
        about,
    )


def _select(name: str, label: str, choices: dict[str, str]) -> str:
    options = (tag("option", escape(text), value=value) for value, text in choices.items())
    return tag("label", tag("span", label), tag("select", *options, name_=name))


def _slider(name: str, label: str, low: float, high: float, step: str = "any", class_: str | None = None) -> str:
    """On a logarithmic axis; the number beside it can be written."""
    slide = f'<input type="range" name="{name}-slide" min="0" max="1" step="0.001" data-low="{low}" data-high="{high}">'
    number = f'<input type="number" name="{name}" min="0" step="{step}" inputmode="decimal" aria-label="{label}">'
    return tag("div", tag("label", tag("span", label), slide), number, class_=f"slider {class_ or ''}".strip())


def _controls() -> list[str]:
    divergences = {"none": "none"} | {n: f"{n}: {d.meaning}" for n, d in DIVERGENCES.items()}
    levels = {
        "token": "token: each its own ratio",
        "sequence": "sequence: their product",
        "sequence-mean": "sequence-mean: their geometric mean",
    }
    reductions = {
        "token-mean": "all tokens alike",
        "seq-mean-token-sum": "responses alike, their tokens summed",
        "seq-mean-token-mean": "responses alike, divided by |y|",
        "constant": "by a constant a response",
    }
    parts = [
        _select("divergence", "KL term, divergence", divergences),
        _slider("beta", "β", 1e-4, 3.0, class_="kl"),
        _slider("v", "v = ref/old", 0.3, 3.0, class_="kl"),
        _select("kl_in_clip", "KL term and clip", {"": "as published", "true": "cut together", "false": "KL is kept"}),
        tag("label", '<input type="checkbox" name="through_advantage">', tag("span", "through Â too"), class_="check"),
        _select("estimator", "estimator", {"differentiable": "differentiable", "reinforce": "REINFORCE, −sg(ω)·log π"}),
        _select("clip", "clip", {n: n for n in ("none", *RULES)}),
        tag("div", id="options"),
        _select("level", "level of the ratio", levels),
        _select("reduction", "averaged over", reductions),
        _slider("advantage", "|A|", 0.05, 5.0),
        _slider("p", "old probability", 0.01, 0.9, class_="looks"),
    ]
    form = tag("form", *parts, id="controls", aria_label="The loss")
    return [tag("details", tag("summary", "Change the loss"), form, open="", class_="panel")]


def _pictures() -> str:
    sides = []
    for sign, words, letter in (("positive", "A > 0: it did well", "+"), ("negative", "A < 0: it did badly", "−")):
        head = tag("h2", escape(words))
        said = tag("p", class_="said", aria_live="polite")
        plots = [
            tag("figure", tag("figcaption", caption), tag("div", class_="plot", data_plot=kind), class_="chart")
            for kind, caption in (
                ("omega", "<b>gradient ω = −c</b>: what multiplies ∇log π"),
                ("weight", "<b>weight</b>: what is left of the ratio, and multiplies A"),
            )
        ]
        sides.append(tag("section", head, said, *plots, id=sign, data_sign=letter))
    bar = tag(
        "div",
        tag("label", tag("span", "at ratio", id="letter"), '<input type="number" name="w" min="0" step="any">'),
        tag("button", "closer", type="button", id="closer"),
        tag("button", "wider", type="button", id="wider"),
        tag("button", "copy link", type="button", id="copy"),
        class_="bar",
    )
    key = tag(
        "p",
        '<i class="line"></i> this loss <i class="line thin"></i> the same without its clip '
        '<i class="box"></i> cut: no reward gradient <i class="box held"></i> held at the limit. '
        "Point, touch, or focus a curve and use ← and →.",
        class_="key",
    )
    texts = [
        tag("section", tag("h2", "The formula"), tag("div", id="formula"), _letters(), class_="formula"),
        tag(
            "section",
            tag("h2", "The same in plain torch"),
            tag("pre", tag("code", id="code"), tabindex="0"),
            tag("p", "Its gradient is the curve above; a test runs it.", class_="small"),
        ),
        tag("section", tag("h2", "Is it the gradient that was meant?"), tag("div", id="audit"), class_="wide"),
    ]
    trouble = tag("p", id="trouble", role="status")
    return tag(
        "div", trouble, bar, tag("div", *sides, class_="sides"), key, tag("div", *texts, class_="words"), class_="show"
    )


def _letters() -> str:
    letters = {
        "π, old, ref": "the policy now, the one that sampled (μ), the anchor of the KL term",
        "w, u, v": "π/old, π/ref, ref/old: w = u·v",
        "sg": "stop-gradient",
        "|y|": "tokens of the response",
    }
    rows = (tag("div", tag("dt", escape(k)), tag("dd", escape(v))) for k, v in letters.items())
    return tag("dl", *rows)


def _footer() -> str:
    return tag(
        "footer",
        tag(
            "p",
            "The curves are drawn by the source of rpg.PolicyLoss itself, translated to JavaScript when this page was "
            "made. A test compares them with autograd at a thousand random settings. ",
            "Methods that compare tokens with each other, bound each token of a product or read more than a ratio are "
            "not on this page.",
        ),
        tag("pre", "rpg algorithms --html explorer.html"),
    )
