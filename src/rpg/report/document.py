"""Runs as one self-contained HTML page. Words and tables need no script; page.js draws the rest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.resources import files
from pathlib import Path

from .. import __version__
from ..console import amount, duration, percent, tag, unbroken
from .charts import Chart, present
from .labels import Style, interval, plural, repeats, run_labels, spread, status_badge, styles, swatch
from .metrics import finite
from .payload import EVALS, embed, payload, sampled, stride
from .runs import RunData
from .scores import Experiment, averages, group_by_experiment, scores
from .tables import results_section, settings_section

BUDGETS = ("minutes", "tokens")
SCRIPTS = ("chart.js", "samples.js", "page.js")


def write(runs: Sequence[RunData], output: str | Path) -> None:
    """A link by the name of a run's own page is replaced, not followed: a stranger's may lead to any file."""
    text, output = page(runs), Path(output)
    if output.is_symlink() and output.name == "report.html":
        output.unlink()
    output.write_text(text, encoding="utf-8")


def page(runs: Sequence[RunData]) -> str:
    if not runs:
        raise ValueError("runs must have at least one run")
    experiments = group_by_experiment(runs)
    runs = [run for experiment in experiments for run in experiment.runs]
    charts = present(runs)
    shown, responses, all_responses = sampled(runs)
    data = payload(runs, run_labels(runs), experiments, charts, shown)
    tasks = list(dict.fromkeys(task for run in runs for task in scores(run)))
    curves = [
        tag("div", class_="toolbar", id="toolbar", role="group", aria_label="Curves"),
        accuracy_section(runs, any(run["evals"] for run in data["runs"]), any(len(run.rows) > EVALS for run in runs)),
        results_section(experiments, tasks) if len(runs) > 1 else "",
        training_section(charts, stride(runs), len(runs) == 1),
    ]
    sections = [
        tag("div", *curves, class_="curves"),
        settings_section(runs, experiments),
        samples_section(responses, all_responses),
    ]
    script = "'use strict';\n{\n" + "".join(_file(name) for name in SCRIPTS) + "}\n"
    title = headline(runs, tasks)
    body = [
        _header(runs, experiments, tasks, title),
        tag("main", *sections),
        _footer(runs),
        tag("script", embed(data), type="application/json", id="data"),
        tag("script", script),
    ]
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
        '<link rel="icon" href="data:,">',
        tag("title", escape(title)),
        tag("style", _file("page.css")),
    )
    text = "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, as some tokenizers decode to


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """The page may load nothing and run this one script: a second fence around text that models wrote."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


# ---- the top ---------------------------------------------------------------------------------------------------------


def headline(runs: Sequence[RunData], tasks: Sequence[str]) -> str:
    if len(runs) == 1:
        run, by_task = runs[0], scores(runs[0])
        if not by_task:
            return f"{run.algorithm} on {run.task}" if run.task else run.algorithm
        task, score = next(iter(by_task.items()))
        if score.last_step == score.first_step:
            return f"{percent(score.last)} on {task}" + (" before training" if score.last_step == 0 else "")
        return f"From {percent(score.first)} to {percent(score.last)} on {task}"
    algorithms = len({run.algorithm for run in runs})
    what = plural(algorithms, "algorithm") if algorithms > 1 else runs[0].algorithm
    where = f" on {tasks[0]}" if len(tasks) == 1 else f" on {len(tasks)} tasks" if tasks else ""
    return f"{what}, {plural(len(runs), 'run')}{where}"


def _header(runs: Sequence[RunData], experiments: Sequence[Experiment], tasks: Sequence[str], title: str) -> str:
    kicker = tag("p", f"rpg report · {date.today().isoformat()}", class_="kicker")
    lede = _about(runs[0]) if len(runs) == 1 else _ranking(experiments, tasks)
    several = [_experiment_card(*both, tasks) for both in zip(styles(experiments), experiments, strict=True)]
    cards = _cards(runs[0]) if len(runs) == 1 else several
    labelled = zip(runs, run_labels(runs), strict=True)
    warned = [note for run, label in labelled for note in notes(run, label, len(runs) > 1)] + repeats(experiments)
    warnings = tag("ul", *(tag("li", escape(note)) for note in warned), class_="notes") if warned else ""
    return tag("header", kicker, tag("h1", unbroken(title)), lede, tag("ul", *cards, class_="cards"), warnings)


def _about(run: RunData) -> str:
    size = finite(run.summary.get("parameters"))
    model = str(run.fact("model", "")).rstrip("/").rsplit("/", 1)[-1]
    model += f" ({amount(size)} parameters)" if size else ""
    facts = [
        tag("b", escape(run.algorithm)),
        escape(f"model {model}") if model else "",
        escape(f"task {run.task}") if run.task else "",
        escape(f"seed {run.fact('seed', '–')}"),
        escape(f"on {run.summary['device']}") if run.summary.get("device") else "",
    ]
    return tag("p", " · ".join(fact for fact in facts if fact), class_="lede")


def _ranking(experiments: Sequence[Experiment], tasks: Sequence[str]) -> str:
    ranked = [(both[0], each) for each in experiments if tasks and (both := averages(each, tasks[0]))]
    if len(ranked) < 2:
        return ""
    ranked.sort(key=lambda pair: -pair[0].mean)
    (high, top), (low, bottom) = ranked[0], ranked[-1]
    text = (
        f"On {tasks[0]}, {top.label} ends highest with {spread(high)} % ({plural(high.n, 'seed')}), "
        f"{bottom.label} lowest with {spread(low)} % ({plural(low.n, 'seed')})."
    )
    return tag("p", unbroken(text), class_="lede")


def _card(title: str, value: str, *lines: str, kind: str | None = None) -> str:
    texts = (tag("p", unbroken(line)) for line in lines if line)
    return tag("li", tag("h3", title), tag("strong", unbroken(value)), *texts, class_=kind)


def _cards(run: RunData) -> list[str]:
    by_task = scores(run)
    cards = []
    for task, s in by_task.items():
        where = f" on {task}" if len(by_task) > 1 else ""
        sure = f"95 % interval {interval(s)}" if interval(s) else ""
        last = "Before training" if s.last_step == 0 else "Last"
        cards.append(
            _card(escape(last + where), percent(s.last), f"{s.metric} at step {s.last_step}", sure, kind="first")
        )
        if len(by_task) == 1 and s.last_step > s.first_step:
            cards.append(_card("Best", percent(s.best), f"at step {s.best_step}", "the highest of noisy readings"))
            before = "before training" if s.first_step == 0 else f"at step {s.first_step}"
            cards.append(_card("First", percent(s.first), before, f"{100 * (s.last - s.first):+.1f} points since"))
    planned = finite(run.fact("steps"))
    steps = f"{run.step} of {planned:.0f} steps" if planned else plural(run.step, "step")
    if (budget := run.summary.get("stopped_by")) in BUDGETS:
        steps += f", ended by its {finite(run.config.get(budget)) or 0:,g} {budget}"
    tokens = f"{amount(run.tokens)} tokens sampled" if run.tokens else ""
    speed = f"{amount(run.speed)} tokens/s" if run.speed else ""
    cards.append(_card(status_badge(run), duration(run.seconds), steps, ", ".join(t for t in (tokens, speed) if t)))
    return cards


def _experiment_card(style: Style, experiment: Experiment, tasks: Sequence[str]) -> str:
    title = swatch(style) + escape(experiment.label)
    for task in tasks:
        if both := averages(experiment, task):
            last, best = both
            first = next(s for run in experiment.counted if (s := scores(run).get(task)))
            sure = f"95 % interval {interval(first)}" if last.n == 1 and interval(first) else ""
            seeds = f"last {first.metric} on {task}" + (f", {plural(last.n, 'seed')}" if last.n > 1 else "")
            return _card(title, f"{spread(last)} %", seeds, sure or f"best {spread(best)} %")
    return _card(title, "–", "no evaluation yet", plural(len(experiment.runs), "run"))


def notes(run: RunData, label: str, named: bool) -> list[str]:
    """What a reader must know before trusting the numbers."""
    texts = []
    planned = run.summary.get("stopped_by") in BUDGETS  # its status says enough
    if run.status == "failed" or (run.summary.get("message") and not planned):
        texts.append(f"{run.status} at step {run.step}" + (f": {m}" if (m := run.summary.get("message")) else ""))
    failures = run.summary.get("reward_failures")
    counted = {k: n for k, v in (failures.items() if isinstance(failures, dict) else ()) if (n := finite(v))}
    if counted:
        each = ", ".join(f"{n:.0f} {kind.replace('_', ' ')}" for kind, n in counted.items())
        texts.append(f"reward calls that failed: {each}")
    skipped = run.rows.total("skipped")
    if skipped:
        texts.append(f"{plural(int(skipped), 'optimiser step')} skipped: the loss was not finite")
    for event in run.lights:
        until = f", until step {end:.0f}" if (end := finite(event.get("until"))) is not None else ""
        texts.append(f"warning light at step {event['step']:.0f}{until}: {event['text']}")
    texts += run.remarks
    if not len(run.rows):
        texts.append("no step has been written yet")
    return [f"{label}: {text}" if named else text[:1].upper() + text[1:] for text in texts]


# ---- figures: the script fills them ----------------------------------------------------------------------------------


def figure(key: str, title: str, caption: str, kind: str = "small") -> str:
    head = tag("div", tag("h3", escape(title), id=f"title-{key}"), tag("div", class_="tabs"), class_="top")
    inside = (head, tag("div", class_="readout"), tag("div", class_="plot"), tag("figcaption", unbroken(caption)))
    return tag("figure", *inside, class_=f"chart {kind}", id=f"chart-{key}")


def accuracy_section(runs: Sequence[RunData], evaluated: bool, thinned: bool) -> str:
    caption = (
        "Held-out accuracy, with the 95 % interval of each evaluation as a band"
        + (
            "; over several seeds the line is their mean and the band reaches from the lowest to the highest. "
            if len(runs) > 1
            else ". "
        )
        + "Thin: share of the training responses that were right, on the prompts trained on, which is no test. "
        "Evaluations are never smoothed"
    )
    caption += f"; of more than {EVALS:,}, the lowest and the highest of neighbours are drawn." if thinned else "."
    without = tag("noscript", tag("p", "The curves and the responses need JavaScript; the tables do not."))
    nothing = "" if evaluated else tag("p", "No evaluation has been written yet.")
    return tag(
        "section",
        tag("h2", "Accuracy"),
        nothing,
        without,
        figure("accuracy", "Share of responses that are right", caption, "large"),
        id="accuracy",
    )


def training_section(charts: Sequence[Chart], width: int, ranges: bool) -> str:
    if not charts:
        return ""
    thinned = ""
    if width > 1:
        band = ", the band reaches from their lowest to their highest" if ranges else ""
        thinned = f" These runs are long: each point is the mean of {width} steps{band}."
    lede = (
        "Point at a curve, or focus it and use ← and →, to read all of them at one step: the numbers as logged, not "
        "smoothed." + thinned
    )
    figures = (figure(chart.key, chart.title, chart.caption) for chart in charts)
    return tag(
        "section", tag("h2", "Training"), tag("p", unbroken(lede)), tag("div", *figures, class_="grid"), id="training"
    )


def samples_section(shown: int, total: int) -> str:
    if not total:
        return ""
    left = total - shown
    some = (
        f"{shown:,} of the {total:,} responses that were logged, chosen evenly over the steps; {left:,} are left out."
    )
    text = (
        some if left else f"{plural(total, 'response')} that the run logged."
    ) + " Responses to one prompt stand together."
    return tag("section", tag("h2", "Responses"), tag("p", text), tag("div", id="browser"), id="samples")


def _footer(runs: Sequence[RunData]) -> str:
    versions = list(
        dict.fromkeys(
            ", ".join(f"{name} {value}" for name, value in v.items())
            for run in runs
            if isinstance(v := run.summary.get("versions"), dict)
        )
    )
    folders = ", ".join(str(run.folder) for run in runs)
    facts = [
        ("Folders" if len(runs) > 1 else "Folder", folders),
        ("Ran with", "; ".join(versions)),
        ("Page by", f"rpg {__version__}"),
    ]
    started = sorted(str(run.summary["started"]) for run in runs if run.summary.get("started"))
    facts.insert(1, ("Started", started[0] if started else ""))
    return tag("footer", tag("dl", *(tag("div", tag("dt", k), tag("dd", escape(v))) for k, v in facts if v)))
