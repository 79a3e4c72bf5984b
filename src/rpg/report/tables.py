"""Last and best, every run, and the settings in which runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..console import amount, duration, percent, tag, unbroken
from .labels import interval, run_labels, spread, status_badge, styles, swatch
from .runs import RunData
from .scores import Experiment, Score, averages, differences, scores, settings


def results_section(experiments: Sequence[Experiment], tasks: Sequence[str]) -> str:
    elements = [tag("h2", "Results")]
    if tasks:
        elements += [_last_best(experiments, tasks)]
    return tag("section", *elements, tag("h3", "Every run"), _every_run(experiments, tasks), id="results")


def _last_best(experiments: Sequence[Experiment], tasks: Sequence[str]) -> str:
    table = {(g, task): averages(each, task) for g, each in enumerate(experiments) for task in tasks}
    marks = {
        (task, k): _marks([both[k].mean for (_, t), both in table.items() if both and t == task])
        for task in tasks
        for k in (0, 1)
    }
    runs = [run for experiment in experiments for run in experiment.runs]
    metrics = {task: sorted({s.metric for run in runs if (s := scores(run).get(task))}) for task in tasks}
    over = (
        tag("th", tag("b", escape(task)), escape(" / ".join(metrics[task]) + ", %"), colspan=2, scope="colgroup")
        for task in tasks
    )
    names = "".join(tag("th", text, scope="col") for _ in tasks for text in ("Last", "Best"))
    head = tag("thead", tag("tr", tag("td"), tag("td"), *over), tag("tr", *_heads("algorithm", "seeds"), names))
    rows, unfinished = [], False
    coloured = styles(experiments)
    for i, experiment in enumerate(experiments):
        cells = []
        early = any(run.status not in ("finished", "unknown") for run in experiment.counted)
        unfinished |= early
        for task in tasks:
            both = table[i, task]
            for k in (0, 1):
                if both is None:
                    cells.append(tag("td", "–", class_="number"))
                    continue
                text = tag("data", escape(spread(both[k])), value=repr(both[k].mean))
                mark = marks[task, k].get(_rounded(both[k].mean))
                cells.append(tag("td", text if mark is None else tag(mark, text), class_="number"))
        name = swatch(coloured[i]) + escape(experiment.label) + (" †" if early else "")
        seeds = tag("td", str(len(experiment.counted)), class_="number")
        rows.append(tag("tr", tag("th", name, scope="row"), seeds, *cells))
    caption = (
        "Last: the last evaluation of each run. Best: the highest of each run, which favours runs with many or noisy "
        "evaluations. Means over seeds ± their standard deviation; bold: highest in its column, underlined: second "
        "highest. Neither is a test of significance."
    )
    caption += " † Not all of its runs are finished." if unfinished else ""
    inside = tag("table", head, tag("tbody", *rows), class_="results")
    return tag("figure", _scroll(inside, "Last and best accuracy"), tag("figcaption", unbroken(caption)))


def _marks(means: Sequence[float]) -> dict[float, str]:
    """How values of a column are set: the highest bold and, of three or more, the second highest underlined. Equal ones
    are set alike, and what is next below them is the second highest."""
    ranked = sorted({_rounded(mean) for mean in means}, reverse=True)
    names = ("strong", "u") if len(means) > 2 else ("strong",) if len(means) > 1 else ()
    return dict(zip(ranked, names, strict=False))


def _rounded(mean: float) -> float:
    """Means of the same numbers in another order are equal."""
    return round(mean, 9)


def _heads(*texts: str) -> str:
    return "".join(tag("th", text, scope="col") for text in texts)


def _scroll(table: str, label: str) -> str:
    """Wide tables scroll inside; the page does not."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _every_run(experiments: Sequence[Experiment], tasks: Sequence[str]) -> str:
    runs = [run for experiment in experiments for run in experiment.runs]
    many = len(tasks) > 1
    columns = ["task"] * many + ["first", "last", "95 % interval", "best", "at step"]
    head = _heads("run", "algorithm", "seed", "status", "step", *columns, "time", "tokens/s")
    bodies = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        by_task, over = scores(run), (tasks or [""])
        tall = {"rowspan": len(over)} if len(over) > 1 else {}
        before = [escape(run.algorithm), escape(str(run.fact("seed", "–"))), status_badge(run)]
        left = tag("th", escape(label), scope="row", **tall) + "".join(tag("td", text, **tall) for text in before)
        left += tag("td", str(run.step), class_="number", **tall)
        right = [tag("td", unbroken(t), class_="number", **tall) for t in (duration(run.seconds), amount(run.speed))]
        rows = []
        for task in over:
            s = by_task.get(task)
            numbers = [task] * many + (["–"] * 5 if s is None else _score_cells(s))
            cells = [tag("td", unbroken(text), class_="number") for text in numbers]
            rows.append(tag("tr", left, *cells, *right))
            left, right = "", []
        bodies.append(tag("tbody", *rows))
    return _scroll(tag("table", tag("thead", tag("tr", head)), *bodies, class_="runs"), "Every run")


def _score_cells(s: Score) -> list[str]:
    return [percent(s.first), percent(s.last), interval(s) or "–", percent(s.best), str(s.best_step)]


def settings_section(runs: Sequence[RunData], experiments: Sequence[Experiment]) -> str:
    shared = {
        key: value for key, value in settings(runs[0]).items() if all(settings(r).get(key) == value for r in runs)
    }
    elements = [tag("h2", "Settings")]
    if len(runs) > 1:
        differ = differences(runs)
        if differ:
            place = {id(run): i for i, run in enumerate(runs)}
            heads = _heads("setting", *(escape(experiment.label) for experiment in experiments))
            rows = []
            for key, values in differ.items():
                seen = (dict.fromkeys(values[place[id(run)]] for run in each.runs) for each in experiments)
                cells = (tag("td", escape(" / ".join(texts))) for texts in seen)
                rows.append(tag("tr", tag("th", tag("code", escape(key)), scope="row"), *cells))
            table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", *rows), class_="differences")
            elements += [tag("p", "Only what differs, seed and output aside."), _scroll(table, "Settings that differ")]
        else:
            elements.append(tag("p", "These runs differ in nothing but their seeds and folders."))
    if shared:
        pairs = "".join(tag("div", tag("dt", escape(k)), tag("dd", escape(v))) for k, v in shared.items())
        title = "All of them" if len(runs) == 1 else f"The {len(shared)} settings that all runs share"
        elements.append(tag("details", tag("summary", title), tag("dl", pairs)))
    return tag("section", *elements, id="settings") if len(elements) > 1 else ""
