"""Names, badges and spreads of runs, as the page shows them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ..console import tag
from .runs import RunData
from .scores import Average, Experiment, Score


def plural(n: int, what: str) -> str:
    """1 run, 2 runs, never broken over two lines."""
    return f"{n}\u00a0{what}" if n == 1 else f"{n}\u00a0{what}s"


def spread(average: Average) -> str:
    """90.4 ± 0.5, in percent"""
    more = "" if average.deviation is None else f" ± {100 * average.deviation:.1f}"
    return f"{100 * average.mean:.1f}{more}"


def interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{100 * score.low:.1f}–{100 * score.high:.1f} %"


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """Names, or where two runs share one, folders."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def repeats(experiments: Sequence[Experiment]) -> list[str]:
    """Runs that were made again with the same seed, a line for each seed."""
    runs = [run for experiment in experiments for run in experiment.runs]
    names = {id(run): label for run, label in zip(runs, run_labels(runs), strict=True)}
    again = [same for experiment in experiments for same in experiment.by_seed if len(same) > 1]
    return [
        f"{names[id(last)]} repeats {' and '.join(names[id(run)] for run in before)}: counted once"
        for *before, last in again
    ]


def status_badge(run: RunData) -> str:
    kind = run.status if run.status in ("running", "finished", "stopped", "failed") else "unknown"
    return tag("span", escape(run.status), class_=f"status {kind}")


# ---- colours ---------------------------------------------------------------------------------------------------------

# A method has its place for good, so that it looks the same on every page: new ones go to the end.
ORDER = """
    rpg-reinforce-urkl rpg-urkl grpo grpo-corrected dapo rpg-reinforce-ufkl gspo cispo dr-grpo ppo
    rpg-ufkl rpg-rkl rpg-fkl rpg-reinforce-rkl rpg-reinforce-fkl reinforce reinforce++ rloo remax gpg
    cpgd reinforce++-baseline pmd-mean pmd-partition atr-grpo capo topr sapo maxrl opo
    otb warp distill dppo-tv dppo-kl gmpo luspo vespo clip-cov kl-cov
    high-entropy skywork-or1 rpg-rkl-printed rpg-urkl-printed
"""
METHODS = ORDER.split()
COLOURS = 10  # c0 … c9 in page.css
DASHES = (None, "7 4", "2 3", "11 3 2 3", "16 3")  # of lines; dots have forms for them, d0 … d4 in page.css


class Style(NamedTuple):
    colour: int
    form: int

    @property
    def swatch(self) -> str:
        return f"c{self.colour} d{self.form}"

    @property
    def dash(self) -> str | None:
        return DASHES[self.form]


def styles(experiments: Sequence[Experiment]) -> list[Style]:
    """A colour for each method, whatever else is on the page, and a dash for each of its variants. Where all are of one
    method, the colours are the variants'."""
    return styles_of([experiment.runs[0].algorithm for experiment in experiments])


def styles_of(methods: Sequence[str]) -> list[Style]:
    places = list(range(len(methods))) if len(set(methods)) == 1 else list(map(_place, methods))
    chosen: list[Style] = []
    for place in places:
        colour, form = place % COLOURS, place // COLOURS
        forms = [Style(colour, (form + more) % len(DASHES)) for more in range(len(DASHES))]
        chosen.append(next((style for style in forms if style not in chosen), forms[0]))
    return chosen


def _place(method: str) -> int:
    """Of one that is not ours, by its name."""
    return METHODS.index(method) if method in METHODS else zlib.crc32(method.encode("utf-8", "replace"))


def swatch(style: Style) -> str:
    return f'<i class="swatch {style.swatch}"></i>'
