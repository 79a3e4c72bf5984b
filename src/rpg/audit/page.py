"""An audit as one self-contained HTML page: no script, no network, figures as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path

from ..console import percent_two_digits, tag, two_digits, unbroken
from .problem import FEEDS, SCENARIOS, EnumeratedProblem
from .summary import (
    LENGTHS,
    ON_POLICY,
    REF_IS_OLD,
    RIGHT_WHERE,
    SHORT,
    THREE_POLICIES,
    AuditReport,
    Library,
    Line,
    bias_text,
    finding,
    grade,
    is_or_are,
    is_right,
    joined_labels,
    kl_finding,
    merge,
    named,
    off_policy_finding,
)
from .truncated import SHOWN, TOP_P

Scale = Callable[[float], float]  # a value -> its place on a strip, in percent
LENGTH_NAMES = {"fixed": "fixed lengths", "variable": "variable lengths"}


def html(report: AuditReport) -> str:
    title = headline(report)
    figures = (names_section, kl_section, lengths_section, truncated_section, variance_section, method_section)
    sections = [figure(report) for figure in figures]
    body = [
        *_header(report, title),
        tag("main", *(section for section in sections if section), table_section(report), details(report)),
        _footer(report),
    ]
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        tag("title", escape(title)),
        tag("style", Path(__file__).with_name("page.css").read_text(encoding="utf-8")),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"


# ---- the top ---------------------------------------------------------------------------------------------------------


def headline(report: AuditReport) -> str:
    total = len(report.lines)
    wrong = sum(line.right_where != "everywhere" for line in report.lines)
    if total == 1:
        return finding(report).rstrip(".")
    if wrong == 0:
        return f"All {total} losses have the exact gradient"
    right = total - wrong
    return f"{right} of {total} policy-gradient losses {'has' if right == 1 else 'have'} the exact gradient"


def _header(report: AuditReport, title: str) -> list[str]:
    lede = tag("p", escape(finding(report)), class_="lede") if len(report.lines) > 1 else ""
    kicker = tag("p", f"rpg audit · {report.date}", class_="kicker")
    cards = tag("ul", *map(_card, report.libraries), class_="cards")
    return [tag("header", kicker, tag("h1", escape(title)), lede, cards)]


def _card(library: Library) -> str:
    right = sum(line.right_where == "everywhere" for line in library.lines)
    count = tag("strong", f"{right} ", tag("small", f"of {len(library.lines)}"))
    return tag(
        "li",
        tag("h3", escape(library.heading)),
        count,
        "right in every setting",
        tag("p", unbroken(off_policy_finding(library))),
    )


# ---- strips: one row of a plot ---------------------------------------------------------------------------------------


def log_scale(lowest: float = 1e-16, highest: float = 10.0) -> Scale:
    def place(x: float) -> float:
        bounded = highest if math.isnan(x) else min(max(x, lowest), highest)
        return 3 + 94 * math.log(bounded / lowest) / math.log(highest / lowest)

    return place


def linear_scale(highest: float) -> Scale:
    return lambda x: 97 * min(x / highest, 1.0)


BIAS = log_scale()
BIAS_TICKS = [
    (1e-16, "10⁻¹⁶", True),
    (1e-12, "10⁻¹²", False),
    (1e-8, "10⁻⁸", True),
    (1e-4, "10⁻⁴", False),
    (1, "1", True),
]


def _grid(scale: Scale, ticks: Iterable[tuple[float, str, bool]]) -> str:
    return "".join(
        f'<line class="grid{"" if main else " fine"}" x1="{scale(x):.2f}%" x2="{scale(x):.2f}%" y1="0" y2="100%"/>'
        for x, _, main in ticks
    )


def dot_strip(x: float, text: str, kind: str, scale: Scale, ticks: Sequence[tuple[float, str, bool]]) -> str:
    """A dot with its number beside it, on the side where there is room."""
    at = scale(x)
    anchor, dx = ("start", 10) if at < 50 else ("end", -10)
    dot = f'<circle class="{kind}" cx="{at:.2f}%" cy="50%" r="5.5"/>'
    label = f'<text x="{at:.2f}%" y="50%" dy=".36em" dx="{dx}" text-anchor="{anchor}">{escape(text)}</text>'
    return f'<svg class="strip" role="img" aria-label="{escape(text)}">{_grid(scale, ticks)}{dot}{label}</svg>'


def pair_strip(before: float, after: float, scale: Scale, ticks: Sequence[tuple[float, str, bool]]) -> str:
    """A ring where it was, a dot where it is, and a line between them."""
    a, b = scale(before), scale(after)
    link = f'<line class="link" x1="{a:.2f}%" x2="{b:.2f}%" y1="50%" y2="50%"/>'
    ring = f'<circle class="hollow {grade(before)}" cx="{a:.2f}%" cy="50%" r="6.5"/>'
    dot = f'<circle class="{grade(after)}" cx="{b:.2f}%" cy="50%" r="3.6"/>'
    label = escape(f"{bias_text(before)}, then {bias_text(after)}")
    return f'<svg class="strip" role="img" aria-label="{label}">{_grid(scale, ticks)}{link}{ring}{dot}</svg>'


def axis(scale: Scale, ticks: Iterable[tuple[float, str, bool]]) -> str:
    marks = "".join(
        f'<text class="{"" if main else "fine"}" x="{scale(x):.2f}%" y="13" text-anchor="middle">{escape(text)}</text>'
        for x, text, main in ticks
    )
    return f'<svg class="strip axis" aria-hidden="true">{marks}</svg>'


def data(value: float | None, text: str) -> str:
    return tag("data", escape(text), value=repr(value)) if value is not None else escape(text)


def _widths(*columns: str) -> str:
    return tag("colgroup", *(f'<col class="{name}">' for name in columns))


def _scenario_heads() -> str:
    return "".join(tag("th", tag("b", escape(s)), escape(text), scope="col") for s, text in SCENARIOS.items())


def _library_row(library: Library, columns: int, remark: str = "") -> str:
    small = " " + tag("small", unbroken(remark)) if remark else ""
    return tag("tr", tag("th", escape(library.heading), small, colspan=columns, scope="rowgroup"))


# ---- what is wrong, in words -----------------------------------------------------------------------------------------


def names_section(report: AuditReport) -> str:
    found = named(report)
    if not found:
        return ""
    rows = []
    for words, libraries in found:
        if len(report.lines) == 1:
            rows.append(tag("li", escape(words)))
            continue
        having = "; ".join(f"{title}: {joined_labels(lines)}" for title, lines in libraries)
        rows.append(tag("li", tag("b", escape(words)), ": ", tag("span", escape(having), class_="note")))
    return tag(
        "section",
        tag("h2", "What is wrong, in words"),
        tag(
            "p",
            "A name is given where the expected gradient, on every problem, is that of one known mistake and of "
            "nothing else. It comes from the numbers alone: no source is read.",
        ),
        tag("ul", *rows),
        id="names",
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def kl_section(report: AuditReport) -> str:
    libraries = [library for library in report.libraries if any(line.kl_bias() is not None for line in library.lines)]
    if not libraries:
        return ""

    def cell(bias: float | None) -> str:
        if bias is None:
            return tag("td", tag("span", "–", class_="absent-mark"))
        return tag("td", dot_strip(bias, bias_text(bias), grade(bias), BIAS, BIAS_TICKS))

    bodies = []
    for library in libraries:
        rows = [_library_row(library, 4, kl_finding(library))]
        for label, line in merge(library.with_kl, lambda line: tuple(line.kl_bias(s) for s in SCENARIOS)):
            cells = (cell(line.kl_bias(s)) for s in SCENARIOS)
            rows.append(tag("tr", tag("th", escape(label), scope="row"), *cells))
        bodies.append(tag("tbody", *rows, class_="group"))
    head = tag("thead", tag("tr", tag("th"), _scenario_heads()))
    ends = "".join(tag("td", axis(BIAS, BIAS_TICKS)) for _ in SCENARIOS)
    foot = tag("tfoot", tag("tr", tag("th"), ends))
    caption = tag(
        "figcaption",
        "Relative bias of the KL term alone (all rewards zero), logarithmic axis, fixed lengths. "
        "Losses that cannot be told apart share a row. At 1, or 100 %, the error is as large as the gradient that was "
        "meant; “exact” is the rounding of float64.",
    )
    return tag(
        "section",
        tag("h2", "The KL term: an importance weight decides"),
        tag(
            "p",
            "A penalty estimated on samples of an older policy needs the ratio π/μ in front of it, or its gradient is "
            "that of something else. On-policy the ratio is 1 and its derivative still matters.",
        ),
        tag("figure", tag("table", _widths("name", *["plotted"] * 3), head, *bodies, foot, class_="plot"), caption),
        id="kl",
    )


def lengths_section(report: AuditReport) -> str:
    bodies = []
    for library in report.libraries:
        rows = [_library_row(library, 3)]
        for label, line in merge(library.lines, lambda line: tuple(line.bias(ON_POLICY, n) for n in LENGTHS)):
            fixed, variable = (line.bias(ON_POLICY, n) for n in LENGTHS)
            numbers = tag("td", f"{bias_text(fixed)} → {bias_text(variable)}", class_="number")
            strip = tag("td", pair_strip(fixed, variable, BIAS, BIAS_TICKS))
            rows.append(tag("tr", tag("th", escape(label), scope="row"), strip, numbers))
        bodies.append(tag("tbody", *rows, class_="group"))
    foot = tag("tfoot", tag("tr", tag("th"), tag("td", axis(BIAS, BIAS_TICKS)), tag("td")))
    broken = sum(
        is_right(line.bias(ON_POLICY)) and not is_right(line.bias(ON_POLICY, "variable")) for line in report.lines
    )
    caption = tag(
        "figcaption",
        "Relative bias on-policy, where no importance weight is needed: a ring where all responses have one length, "
        f"a dot where they differ. {broken} of {len(report.lines)} losses {is_or_are(broken)} right with the ring, "
        "wrong with the dot.",
    )
    return tag(
        "section",
        tag("h2", "Lengths: dividing each response by its own"),
        tag(
            "p",
            "A factor 1/|y| is a constant while all responses are equally long. Once they are not, it weighs short "
            "responses more, and the gradient belongs to no objective that was stated.",
        ),
        tag("figure", tag("table", _widths("name", "plotted", "number"), *bodies, foot, class_="plot two"), caption),
        id="lengths",
    )


def truncated_section(report: AuditReport) -> str:
    bodies = []
    for library in report.libraries:
        usual = library.lines[0].subject.feeds[0]
        rows = [_library_row(library, 4, f"given {FEEDS[usual]}")]
        for label, line in merge(library.lines, lambda line: tuple(line.truncated_bias(top_p) for top_p in TOP_P)):
            biases = (line.truncated_bias(top_p) or 0.0 for top_p in TOP_P)
            cells = (tag("td", dot_strip(b, bias_text(b), grade(b), BIAS, BIAS_TICKS)) for b in biases)
            rows.append(tag("tr", tag("th", escape(label), scope="row"), *cells))
        bodies.append(tag("tbody", *rows, class_="group"))
    heads = (tag("th", tag("b", f"top-p {top_p:g}"), scope="col") for top_p in TOP_P)
    head = tag("thead", tag("tr", tag("th"), *heads))
    foot = tag("tfoot", tag("tr", tag("th"), *(tag("td", axis(BIAS, BIAS_TICKS)) for _ in TOP_P)))
    caption = tag(
        "figcaption",
        f"Relative bias against the objective of π, μ and ref, each normalised over the tokens that the sampler kept; "
        f"three policies, drift {report.audit.truncated_drift:g}, clip open.",
    )
    return tag(
        "section",
        tag("h2", "Truncated sampling: over which tokens is the ratio taken?"),
        tag(
            "p",
            "With top-p, top-k or min-p the sampler draws from a part of the vocabulary. A ratio over the whole of it "
            "then compares policies that nobody sampled from. Normalised over the kept tokens it is the right one.",
        ),
        tag("figure", tag("table", _widths("name", *["plotted"] * 3), head, *bodies, foot, class_="plot"), caption),
        id="truncated",
    )


def variance_section(report: AuditReport) -> str:
    """Unbiased token-level losses of rpg, one row per divergence: what is left to choose by."""
    chosen: dict[str, Line] = {}
    for line in report.lines:
        ours = line.subject.source.startswith("rpg") and line.subject.objective == "token" and line.has_kl
        if ours and line.right_where == "everywhere":
            chosen.setdefault(line.subject.divergence, line)
    if len(chosen) < 2:
        return ""
    values = [v for line in chosen.values() for s in SCENARIOS for n in LENGTHS if (v := line.row(s, n).kl_variance)]
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    scale = log_scale(10.0 ** decades[0], 10.0 ** decades[-1])
    ticks = [(10.0**k, f"{10.0**k:g}", True) for k in decades]
    bodies = []
    for lengths in LENGTHS:
        rows = [tag("tr", tag("th", LENGTH_NAMES[lengths].capitalize(), colspan=4, scope="rowgroup"))]
        for divergence, line in chosen.items():
            variances = (line.row(s, lengths).kl_variance or 0.0 for s in SCENARIOS)
            cells = (tag("td", dot_strip(v, two_digits(v), "plain", scale, ticks)) for v in variances)
            rows.append(tag("tr", tag("th", escape(divergence), scope="row"), *cells))
        bodies.append(tag("tbody", *rows, class_="group"))
    head = tag("thead", tag("tr", tag("th"), _scenario_heads()))
    foot = tag("tfoot", tag("tr", tag("th"), *(tag("td", axis(scale, ticks)) for _ in SCENARIOS)))
    final = {d: line.row(THREE_POLICIES).kl_variance or 0.0 for d, line in chosen.items()}
    least, most = min(final, key=final.__getitem__), max(final, key=final.__getitem__)
    caption = tag(
        "figcaption",
        "Variance of the KL term of one response's gradient (all rewards zero), E|g − E[g]|² over |β·∇D|², logarithmic "
        f"axis. With three policies and fixed lengths {least} has the lowest ({two_digits(final[least])}) and {most} "
        f"the highest ({two_digits(final[most])}).",
    )
    return tag(
        "section",
        tag("h2", "Variance: what is left to choose by"),
        tag(
            "p",
            "KL and unnormalised KL have the same expected gradient; their samples differ by a baseline, so in noise.",
        ),
        tag("figure", tag("table", _widths("name", *["plotted"] * 3), head, *bodies, foot, class_="plot"), caption),
        id="variance",
    )


def method_section(report: AuditReport) -> str:
    default = {f.name: f.default for f in fields(EnumeratedProblem)}
    scenarios = "; ".join(f"{name} ({text})" for name, text in SCENARIOS.items())
    sentences = (
        f"A policy over {default['vocabulary']} tokens and responses of at most {default['length']} of them is small "
        "enough to list every response, so the expected gradient of a loss is a finite sum, taken in float64 without "
        "any sampling noise.",
        "What it is compared with comes from autograd on the objective itself, J = E[R] − β·D, written out over all "
        "responses or all states, and shares no formula with the losses under test.",
        "Each loss runs as it ships and is differentiated with respect to every token's log π, with its clip bounds "
        "out of the way for the bias and back in place for what the clip does.",
        "“In the box” is each loss as shipped, clip on, with policies so close that no ratio leaves the clip's bounds: "
        "there the clip must change nothing, token by token.",
        f"“Truncated” draws the samples from the top {SHOWN:g} of μ. The objective is that of the truncated policies, "
        "and each loss is given what its trainer would give it.",
        f"Three scenarios separate the causes: {scenarios}.",
        "A loss's scale is calibrated where π = μ = ref, where every method must agree, so a bias is a wrong direction "
        "or a wrong balance of reward and KL and never just another learning rate.",
    )
    steps = tag("ol", *(tag("li", escape(sentence)) for sentence in sentences))
    return tag("section", tag("h2", "What is measured"), steps, id="method")


# ---- tables ----------------------------------------------------------------------------------------------------------

KEY = {
    "exact": "exact: below 1e-10",
    "rounding": "below 1e-6: rounding of float32",
    "small": "below 10 %",
    "medium": "below 50 %",
    "large": "50 % and more",
}


def _bias_cell(bias: float | None, first: bool = False) -> str:
    return tag("td", data(bias, bias_text(bias)), class_=grade(bias) + (" gap" if first else ""))


def table_section(report: AuditReport) -> str:
    over = "".join(
        tag("th", text, colspan=3, class_="three", scope="colgroup") for text in ("fixed lengths", "variable lengths")
    )
    ends = (tag("th", escape(text), scope="colgroup") for text in ("KL term", "in the box", "truncated"))
    top = tag("tr", *(tag("th", class_="left") for _ in range(3)), over, *ends)
    names = "".join(tag("th", escape(text), class_="left", scope="col") for text in ("loss", "right", "ascends"))
    columns = [*SHORT.values(), *SHORT.values(), SHORT[THREE_POLICIES], "as shipped", f"top-p {SHOWN:g}"]
    head = tag("thead", top, tag("tr", names, *(tag("th", escape(text), scope="col") for text in columns)))
    bodies = []
    for library in report.libraries:
        rows = [_library_row(library, 12)]
        for line in library.lines:
            biases = [(line.bias(s, n), i == 0) for n in LENGTHS for i, s in enumerate(SCENARIOS)]
            where = line.right_where
            rows.append(
                tag(
                    "tr",
                    tag("th", escape(line.label), scope="row", title=line.subject.note or None),
                    tag("td", where, class_=f"where {where}" if where in ("everywhere", "nowhere") else "where"),
                    tag("td", escape(line.claim), class_="claim"),
                    *(_bias_cell(bias, first) for bias, first in biases),
                    *(_bias_cell(b, first=True) for b in (line.kl_bias(), line.box_error, line.truncated_bias())),
                )
            )
        bodies.append(tag("tbody", *rows, class_="group"))
    key = tag("ul", *(tag("li", text, class_=kind) for kind, text in KEY.items()), class_="key")
    where = "; ".join(f"“{name}”: {text}" for name, text in RIGHT_WHERE.items())
    caption = tag(
        "figcaption",
        escape(
            "Relative bias |E[g] − ∇J| / |∇J| against the objective of the loss's own level; the KL term alone with "
            "three policies. “In the box” is the loss as shipped, clip on, where no ratio leaves the clip's bounds: "
            "its bias or, if larger, the error of one token's coefficient. “Truncated” is sampling from the "
            f"top {SHOWN:g} of μ, against the objective of the truncated policies. “ascends” is its divergence and the "
            f"level its ratios are exact at. “right” is {where}."
        ),
    )
    return tag(
        "section",
        tag("h2", "Every loss"),
        key,
        tag(
            "figure",
            tag("table", _widths("name", "where", "claim", *["bias"] * 9), head, *bodies, class_="heat"),
            caption,
        ),
        id="table",
    )


def details(report: AuditReport) -> str:
    titles = [
        *("loss", "vs. sequence", "cosine", "variance", "cut", "left", "clipped bias"),
        *("KL noise", "engine's old", "type", "setting"),
    ]
    head = tag("thead", tag("tr", *(tag("th", title, scope="col") for title in titles)))
    bodies = []
    for library in report.libraries:
        rows = [_library_row(library, len(titles))]
        for line in library.lines:
            row, sequence = line.row(THREE_POLICIES), line.row(THREE_POLICIES, objective="sequence")
            cells = (
                data(sequence.bias, bias_text(sequence.bias)),
                data(row.cosine, f"{row.cosine:.3f}"),
                data(row.variance, two_digits(row.variance)),
                data(row.cut, percent_two_digits(row.cut)),
                data(row.left, percent_two_digits(row.left)),
                data(row.clipped_bias, bias_text(row.clipped_bias)),
                data(noise := line.in_box(REF_IS_OLD).kl_variance, "–" if noise is None else two_digits(noise)),
                data(engine := line.truncated_bias(feed="engine"), bias_text(engine)),
                line.dtype,
            )
            note = tag("td", escape(line.subject.note), class_="note")
            rows.append(tag("tr", tag("th", escape(line.label), scope="row"), *(tag("td", c) for c in cells), note))
        bodies.append(tag("tbody", *rows, class_="group"))
    explained = tag(
        "p",
        "All with three policies and fixed lengths. “vs. sequence” is the bias against the sequence objective, "
        "whatever its level; “cosine” is that of the expected and the exact gradient; “variance” is over |∇J|²; “cut” "
        "is the share of tokens that the clip cuts off from the reward, “left” the gradient that remains on them over "
        "|∇J|; “clipped bias” is the bias with the clip on; “KL noise” is the variance of the KL term's gradient over "
        "its squared size, in the box with ref = old; “engine's old” is the bias under "
        f"top-p {SHOWN:g} where old comes from the engine and the others are taken over the whole vocabulary.",
    )
    table = tag("div", tag("table", head, *bodies, class_="details"), class_="scroll")
    return tag(
        "details", tag("summary", "Variance, the clip, the sequence objective, and the settings"), explained, table
    )


def _footer(report: AuditReport) -> str:
    audit = report.audit
    facts = {
        "versions": report.version_text,
        "seeds": f"{audit.seeds} (0 to {audit.seeds - 1})" if audit.seeds > 1 else "1 (0)",
        "β": f"{audit.beta:g}",
        "drift": f"{audit.drift:g} (size of the random steps between the policies' parameters)",
        "date": report.date,
    }
    facts |= {"not audited": "; ".join(audit.messages)} if audit.messages else {}
    terms = "".join(tag("dt", escape(name)) + tag("dd", escape(value)) for name, value in facts.items())
    return tag("footer", tag("h2", "Made by"), tag("pre", escape(report.command)), tag("dl", terms))
