"""A replay as a table for the terminal or a pipe."""

from __future__ import annotations

import math

from ..console import console, duration, number, printable, printed
from .results import Change, MethodRow, Replayed

KEY = (
    "snr: (|g|² − Var)/Var over groups · ess: effective sample size · cut: share of samples at the clip's bounds · "
    "KL: its share of the gradient · exact: cosine to the same objective without a clip, with exact weights · "
    "as ran: cosine to the method that ran · β×2, clip×½: size of the change it makes, of |g|"
)


def share(x: float | None) -> str:
    """12.3 %; what is not there is –"""
    if x is None or math.isnan(x):
        return "–"
    return "0" if x == 0 else f"{100 * x:.1f} %" if x >= 5e-4 else "<0.1 %"


def cosine(x: float | None) -> str:
    return "–" if x is None or math.isnan(x) else f"{x:.3f}"


def moved(change: Change | None) -> float | None:
    """|g' − g| over |g|."""
    if change is None or math.isnan(change.cosine):
        return None
    return math.sqrt(max(0.0, 1 + change.norm**2 - 2 * change.norm * change.cosine))


def cut(entry: MethodRow) -> float | None:
    return None if entry.below is None or entry.above is None else entry.below + entry.above


def cells(entry: MethodRow) -> list[str]:
    return [
        f"{entry.name}{' *' if entry.ran else ''}",
        number(entry.grad_norm),
        number(entry.snr) if not math.isnan(entry.snr) else "–",
        number(entry.metrics.get("ess")),
        share(cut(entry)),
        share(entry.kl_share),
        cosine(entry.cosine_exact),
        cosine(entry.cosine_ran),
        share(moved(entry.betas.get(2.0))),
        share(moved(entry.bounds.get(0.5))),
    ]


TITLES = ("method", "|g|", "snr", "ess", "cut", "KL", "exact", "as ran", "β×2", "clip×½")


def head(done: Replayed) -> str:
    step = done.about.get("step")
    where = f", step {step} of {done.about['trainer']}" if step is not None and "trainer" in done.about else ""
    return (
        f"{done.responses} responses in {done.groups} groups, {done.tokens} tokens{where}; "
        f"{len(done.entries)} methods in {duration(done.seconds)}"
    )


def findings(done: Replayed) -> list[str]:
    """What the table says, in words."""
    out = []
    known = [entry for entry in done.entries if not math.isnan(entry.snr)]
    if len(known) > 1:
        best = max(known, key=lambda entry: entry.snr)
        beside = f"; {done.ran.name}, which ran, {number(done.ran.snr)}" if done.ran and done.ran is not best else ""
        if best.snr > 0:
            cosine_text = cosine(best.cosine_exact)
            out.append(f"most signal for its noise: {best.name}, {number(best.snr)} (exact {cosine_text}){beside}")
        else:
            out.append("on this batch no method's gradient stands above its noise over groups")
    ran = done.ran
    if ran is not None and "grad_norm" in done.measured:
        theirs = done.measured["grad_norm"]
        out.append(f"* ran; the trainer measured |g| {number(theirs)}, the replay has {number(ran.grad_norm)}")
    return out


def show(done: Replayed) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in TITLES:
        table.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    for entry in done.entries:
        table.add_row(*cells(entry))
    with printed() as to:
        to.print(head(done))
        to.print(table)
        for text in findings(done):
            to.print(printable(text))
        for text in done.notes:
            to.print(f"note: {printable(text)}")
        for name, why in done.left_out.items():
            to.print(f"left out: {name}: {printable(why)}")
        to.print(KEY, style="dim" if console().is_terminal else "")
