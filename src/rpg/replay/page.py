"""A replay as one self-contained HTML page, in the audit's style: no script, no network, figures as inline SVG."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from ..audit import page as audit_page
from ..audit.page import data, dot_strip, linear_scale, log_scale
from ..console import duration, number, tag, unbroken
from .results import Change, MethodRow, Replayed
from .table import cosine, findings, head, moved, share

STYLE = Path(audit_page.__file__).with_name("page.css")
COLUMNS = {
    "|g|": "norm of the whole gradient, before gradient clipping",
    "sd": "what another draw of the groups would change of it: √Var, by the jackknife over groups",
    "snr": "(|g|² − Var)/Var: the signal over its noise; the same whatever a method's scale",
    "ess": "effective sample size of the ratios, as a share of the samples",
    "below": "share of samples at or below the clip's lower bound",
    "above": "share of samples at or above its upper bounds",
    "KL": "|g_KL| / (|g_KL| + |g_reward|), by gradients and not by terms of the loss",
    "exact": "cosine to the gradient of the same objective with exact weights and no clip",
    "as ran": "cosine to the gradient of the method that ran",
}
FACTORS = {0.0: "×0", 0.5: "×½", 2.0: "×2"}


def html(done: Replayed) -> str:
    head_ = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        tag("title", escape(title(done))),
        tag("style", STYLE.read_text(encoding="utf-8")),
    )
    sections = (table_section, noise_section, exact_section, cosine_section, sensitivity_section, measured_section)
    main = tag("main", *(section(done) for section in sections), _method_section())
    return "<!doctype html>\n" + tag("html", head_, tag("body", _header(done), main, _footer(done)), lang="en") + "\n"


def title(done: Replayed) -> str:
    return f"{len(done.entries)} methods on one batch"


def _header(done: Replayed) -> str:
    lede = ". ".join([head(done), *findings(done)]) + "."
    notes = [tag("p", escape(f"Note: {text}")) for text in done.notes]
    kicker = tag("p", "rpg replay", class_="kicker")
    return tag("header", kicker, tag("h1", escape(title(done))), tag("p", escape(lede), class_="lede"), *notes)


def _name(entry: MethodRow) -> str:
    return tag("th", escape(entry.name), " " + tag("small", "ran") if entry.ran else "", scope="row")


def _number(x: float | None) -> str:
    known = x is not None and not math.isnan(x)
    return tag("td", data(x if known else None, number(x) if known else "–"))


def table_section(done: Replayed) -> str:
    top = tag("tr", tag("th", "method"), *(tag("th", escape(c), scope="col") for c in COLUMNS))
    rows = []
    for e in done.entries:
        numbers = (e.grad_norm, e.sd, e.snr, e.metrics.get("ess"))
        shares = (e.below, e.above, e.kl_share)
        cells = [_number(x) for x in numbers] + [tag("td", unbroken(share(x))) for x in shares]
        cells += [tag("td", cosine(x)) for x in (e.cosine_exact, e.cosine_ran)]
        rows.append(tag("tr", _name(e), *cells))
    meant = "; ".join(f"“{name}”: {text}" for name, text in COLUMNS.items())
    table = tag("table", tag("thead", top), tag("tbody", *rows), class_="details")
    left = tag("ul", *(tag("li", tag("b", escape(n)), ": ", escape(why)) for n, why in done.left_out.items()))
    return tag(
        "section",
        tag("h2", "Every method on this batch"),
        tag("figure", tag("div", table, class_="scroll"), tag("figcaption", escape(meant + "."))),
        tag("p", "Left out:") + left if done.left_out else "",
        id="table",
    )


def noise_section(done: Replayed) -> str:
    known = [e for e in done.entries if not math.isnan(e.snr)]
    if not known:
        return ""
    values = [max(e.snr, 1e-3) for e in known]
    low, high = math.floor(math.log10(min(values))), max(0, math.ceil(math.log10(max(values))))
    scale = log_scale(10.0**low, 10.0**high)
    ticks = [(10.0**k, f"{10.0**k:g}", True) for k in range(low, high + 1)]
    rows = (
        tag(
            "tr",
            _name(e),
            tag("td", dot_strip(max(e.snr, 1e-3), number(e.snr), "exact" if e.ran else "plain", scale, ticks)),
        )
        for e in sorted(known, key=lambda e: -e.snr)
    )
    text = (
        "How far the gradient stands above what another draw of groups would change of it. Below 1 most of it is "
        "noise, and a batch larger by 1/snr would bring it to 1. 0 is drawn at 0.001."
    )
    return _strips("Signal over noise", text, list(rows), audit_page.axis(scale, ticks), "noise")


def exact_section(done: Replayed) -> str:
    known = [e for e in done.entries if not math.isnan(e.cosine_exact)]
    scale = linear_scale(1.0)
    ticks = [(x / 4, f"{x / 4:g}", x % 2 == 0) for x in range(5)]
    rows = [
        tag(
            "tr",
            _name(e),
            tag(
                "td",
                dot_strip(
                    max(0.0, e.cosine_exact), cosine(e.cosine_exact), "exact" if e.ran else "plain", scale, ticks
                ),
            ),
        )
        for e in sorted(known, key=lambda e: -e.cosine_exact)
    ]
    text = (
        "Cosine to the gradient of the same objective (the same advantages, divergence, β, anchor and level) with the "
        "right weight on every term, no clip, and every token counted the same. 1/|y| and a missing ratio show here. "
        "Exact weights are noisy themselves: far off-policy a low cosine need not be the method's fault."
    )
    return _strips("Direction: beside exact weights", text, rows, audit_page.axis(scale, ticks), "exact")


def _strips(heading: str, text: str, rows: list[str], axis: str, id_: str) -> str:
    foot = tag("tfoot", tag("tr", tag("th"), tag("td", axis)))
    columns = '<colgroup><col class="name"><col></colgroup>'
    table = tag("table", columns, tag("tbody", *rows), foot, class_="plot")
    return tag("section", tag("h2", escape(heading)), tag("p", escape(text)), tag("figure", table), id=id_)


def _grade(x: float) -> str:
    for least, name in ((0.99, "exact"), (0.95, "rounding"), (0.8, "small"), (0.5, "medium")):
        if x >= least:
            return name
    return "large"


def cosine_section(done: Replayed) -> str:
    top = tag("tr", tag("th"), *(tag("th", str(i), scope="col") for i in range(1, len(done.entries) + 1)))
    rows = []
    for i, (e, row) in enumerate(zip(done.entries, done.cosines, strict=True), 1):
        cells = (
            tag("td", "–" if math.isnan(x) else f"{x:.2f}", class_=None if math.isnan(x) else _grade(x)) for x in row
        )
        rows.append(tag("tr", tag("th", f"{i} {escape(e.name)}", scope="row"), *cells))
    columns = '<colgroup><col class="name"></colgroup>'
    table = tag("table", columns, tag("thead", top), tag("tbody", *rows, class_="group"), class_="heat")
    text = "Cosines of the methods' gradients. At 1 two methods take the same step here, whatever their names."
    return tag(
        "section",
        tag("h2", "Between methods"),
        tag("p", text),
        tag("figure", tag("div", table, class_="scroll")),
        id="cosines",
    )


def _change(change: Change | None) -> str:
    if change is None or math.isnan(change.norm):
        return tag("td", "–")
    apart = share(moved(change))
    return tag("td", unbroken(apart), title=f"norm × {change.norm:.4g}, cosine {change.cosine:.5f}")


def sensitivity_section(done: Replayed) -> str:
    top = [
        "method",
        "β",
        *(f"β {FACTORS[f]}" for f in (0.0, 0.5, 2.0)),
        "clip",
        *(f"clip {FACTORS[f]}" for f in (0.5, 2.0)),
    ]
    rows = []
    for e in done.entries:
        beta = "–" if e.beta is None else f"{e.beta:g}"
        of_beta = [_change(e.betas.get(f)) for f in (0.0, 0.5, 2.0)]
        of_clip = [_change(e.bounds.get(f)) for f in (0.5, 2.0)]
        rows.append(tag("tr", _name(e), tag("td", beta), *of_beta, tag("td", escape(e.clip)), *of_clip))
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", escape(t), scope="col") for t in top))),
        tag("tbody", *rows),
        class_="details",
    )
    text = (
        "|g' − g| over |g|, where g' is the gradient with β, or the clip's distances from 1, times so much. Where it "
        "is small the setting hardly matters on this batch. A cell's title has the norm and the cosine."
    )
    return tag(
        "section",
        tag("h2", "How much the settings matter"),
        tag("p", escape(text)),
        tag("figure", tag("div", table, class_="scroll")),
        id="sensitivity",
    )


def measured_section(done: Replayed) -> str:
    if done.ran is None or not done.measured:
        return ""
    own = {"loss": done.ran.loss, "grad_norm": done.ran.grad_norm, **done.ran.metrics}
    rows = [
        tag("tr", tag("th", escape(name), scope="row"), tag("td", f"{value:.7g}"), tag("td", f"{own[name]:.7g}"))
        for name, value in done.measured.items()
        if name in own
    ]
    top = tag("tr", *(tag("th", t, scope="col") for t in ("", "the trainer measured", "the replay has")))
    table = tag("table", tag("thead", top), tag("tbody", *rows), class_="details")
    return tag("details", tag("summary", "What the trainer measured in this step, beside the replay"), table)


def _method_section() -> str:
    sentences = (
        "The policy scores the batch as in training. From log π of the sampled tokens each method's loss gives what "
        "it multiplies ∇log π by; each gradient is one backward pass with that.",
        "Gradients are taken group by group. Var(g) = G/(G−1)·Σ|g_i − ḡ|² holds advantages, denominators and fitted "
        "bounds of the batch fixed.",
        "Advantages come from the rewards in the file, by each method's own rule; those of the method that ran are "
        "the ones it had. Whitening therefore sees this batch alone.",
        "One batch says what a step is made of. It does not say where training with a method ends.",
    )
    return tag(
        "section", tag("h2", "What is measured"), tag("ol", *(tag("li", escape(s)) for s in sentences)), id="method"
    )


def _footer(done: Replayed) -> str:
    facts = {
        "batch": done.path,
        "model": f"{done.model} ({done.parameters:,} parameters)",
        "temperature": f"{done.about.get('temperature')}",
        "time": f"{duration(done.seconds)}: {done.vectors} backward passes, {duration(done.backward_seconds)}",
    }
    terms = "".join(tag("dt", escape(name)) + tag("dd", escape(value)) for name, value in facts.items())
    return tag("footer", tag("h2", "Made by"), tag("pre", escape(done.command)), tag("dl", terms))
