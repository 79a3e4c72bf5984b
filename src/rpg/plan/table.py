"""A plan as text: for the terminal, or a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..console import amount, estimated_duration, gb, printed
from ..costs.memory import PHASES, read_tokens
from ..loss.describe import advantage_text, clip_text
from ..training.samples.collect import signal_of
from .plan import IF_IT_FITTED, Plan, evaluations

ANCHORS = {
    "old": "anchored to the sampling policy, so no second model is held",
    "frozen": "anchored to the initial model",
    "every": "anchored to a copy, renewed every {every} {count}",
    "kl": "anchored to a copy, renewed when the KL passes {kl:g}",
    "ema": "anchored to a moving average of the weights",
}
REPLACED = {"correct": "groups all solved or none solved", "reward": "groups of equal rewards"}
PARTS = {
    "weights": "{dtype}{base}",
    "masters": "float32 copies of trained weights",
    "moments": "of the optimiser, float32",
    "gradients": "summed in float32",
    "reference": "a second set of weights",
    "dense": "the largest matrix in 4 bits, while it is multiplied",
    "cache": "keys and values{bits}: {slots} rows, {held:,} tokens",
    "reading": "of prompts, {read:,} tokens at a time",
    "activations": "{tokens:,} tokens at a time{recompute}",
    "head": "some tokens over the whole vocabulary",
}
MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("·", "")}


def show(plan: Plan) -> None:
    with printed() as to:
        _show(plan, to)


def _show(plan: Plan, to: Console) -> None:
    config = plan.config
    title = f"{config.algorithm} · {config.model} · {config.task.name} · {plan.device.name}"
    to.print(Text(f"{title}: a plan, nothing is loaded or written", style="bold"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    for name, lines in _facts(plan):
        facts.add_row(name, "\n".join(lines))
    to.print(facts)
    to.print(_memory_table(plan))
    to.print(_time_table(plan))
    for line in _assumptions(plan):
        to.print(Text(line, style="dim"))
    for ok, line in verdicts(plan):
        mark, style = MARKS[ok]
        to.print(Text(f"{mark} {line}", style=style))
    for text in plan.warnings:
        to.print(Text(f"! {text}", style="yellow"))


def _facts(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    config, method, loss = plan.config, plan.method, plan.method.loss
    rollout = config.rollout
    yield (
        "algorithm",
        [
            plan.formula,
            f"advantage {advantage_text(method.advantage)}; clip {clip_text(loss.clip)}; {loss.reduction}",
            _kl(plan),
            "; ".join(
                [
                    f"dynamic sampling: {REPLACED[signal_of(config)]} are replaced"
                    if method.dynamic
                    else "no dynamic sampling" + _own(rollout.dynamic, "rollout.dynamic"),
                    f"overlong penalty in the last {rollout.overlong_tokens} tokens"
                    if method.overlong
                    else "no overlong penalty" + _own(rollout.overlong, "rollout.overlong"),
                ]
            ),
        ],
    )
    trained = "all trained" if plan.trained == plan.parameters else f"{amount(plan.trained)} trained ({_method(plan)})"
    yield "model", [f"{amount(plan.parameters)} parameters, {trained}; {plan.dtype}; known from {plan.known_from}"]
    tests = ", ".join(f"{name} ({rows:,})" if rows else name for name, rows in plan.data.tests.items())
    rows = f", {plan.data.rows:,} rows" if plan.data.rows else ""
    k = config.eval.k
    yield "problems", [f"{plan.data.name}{rows}; evaluated {plan.evaluations} times on {tests}, mean@{k}"]
    yield (
        "a step",
        [
            f"{rollout.prompts} prompts × {rollout.samples} responses of up to {rollout.max_new_tokens:,} tokens"
            f"{_auto(plan, 'rollout.max_new_tokens')}: "
            f"{amount(plan.tokens)} tokens at most; {plan.optimiser_steps} optimiser steps",
        ],
    )
    steps = plan.middle.steps
    limit = ""
    if steps < config.steps:
        budgets = [f"{config.minutes:g} minutes"] if config.minutes is not None else []
        budgets += [f"{config.tokens:,} tokens"] if config.tokens is not None else []
        limit = " or ".join(budgets) + (", over within the first step: " if steps == 1 else ": some ")
    rate = f"lr {config.optim.lr:g}{_auto(plan, 'optim.lr')}"
    counted = f"{steps} step" if steps == 1 else f"{steps} steps"
    yield "run", [f"{limit}{counted}, {steps * plan.optimiser_steps:,} optimiser steps, {rate}"]


def _own(chosen: bool | None, setting: str) -> str:
    return f" ({setting} false)" if chosen is False else ""


def _auto(plan: Plan, path: str) -> str:
    return f" (auto: {plan.auto[path]})" if path in plan.auto else ""


def _method(plan: Plan) -> str:
    return plan.config.peft.method or "an adapter"


def _kl(plan: Plan) -> str:
    method, loss, reference = plan.method, plan.method.loss, plan.config.reference
    if not method.has_kl:
        return "no KL term, so no reference"
    text = f"KL {loss.divergence}, β {loss.beta:g}" if loss.has_kl else f"KL in the reward, β {method.advantage.beta:g}"
    anchor = ANCHORS[method.anchor].format(
        every=reference.every, count=reference.count.replace("optimizer-", "optimiser "), kl=reference.kl
    )
    if reference.model is not None:
        anchor = f"anchored to {reference.model}, a teacher, which is held beside the model"
    elif method.anchor == "frozen":
        anchor += ", of which a copy is held" if plan.memory.reference else ": the model with its adapter off, no copy"
    return f"{text}, {anchor}"


def _memory_table(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory, GB")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("")
    phases = [plan.memory.during(phase) for phase in PHASES]
    facts = {
        "dtype": plan.dtype,
        "base": f", {amount(plan.packed)} of them frozen in 4 bits" if plan.packed else "",
        "bits": "" if plan.config.rollout.cache_dtype == "auto" else " in 8 bits",
        "slots": plan.layout.slots,
        "held": plan.layout.held(plan.config, not plan.device.cpu),
        "read": read_tokens(plan.config),
        "tokens": plan.micro_tokens,
        "recompute": ", recomputed in the backward pass" if plan.recompute else "",
    }
    for name, text in PARTS.items():
        if not {"dense": plan.packed, "head": plan.memory.head}.get(name, True):
            continue
        away = "host" if plan.memory.offload and name in ("masters", "moments") else ""
        values = [gb(phase[name]) if name in phase else away for phase in phases]
        table.add_row(name, *values, text.format(**facts) if getattr(plan.memory, name) else "none")
    table.add_section()
    table.add_row(
        "together",
        *(gb(sum(phase.values())) for phase in phases),
        f"of {gb(plan.device.memory)}, {gb(plan.available)} to plan with",
    )
    return table


def _time_table(plan: Plan) -> Table:
    cases = (plan.low, plan.middle, plan.high)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("time, estimated")
    # where a budget ends the run, short responses are more steps, with more evaluations: the longer run
    for title in ("short", "middle", "long") if plan.limited else ("low", "middle", "high"):
        table.add_column(title, justify="right")
    table.add_row("mean response, tokens", *(f"{case.length:,.0f}" for case in cases))
    if plan.method.dynamic:
        table.add_row("prompts sampled for one kept", *(f"{case.sampled:g}" for case in cases))
    table.add_section()
    labels = {"rollout": "  rollout", "logp": "  log-probabilities", "train": "  training", "offload": "  offload"}
    if not plan.memory.offload:
        del labels["offload"]
    for name, label in (labels | {"step": "a step"}).items():
        table.add_row(label, *(estimated_duration(getattr(case.seconds, name)) for case in cases))
    table.add_row("an evaluation", *(estimated_duration(case.seconds.evaluation) for case in cases))
    table.add_section()
    if plan.limited:
        evaluated = (evaluations(plan.config, case.steps) for case in cases)
        table.add_row("steps", *(f"{case.steps:,}" for case in cases))
        table.add_row("evaluations, not counted in minutes", *(f"{number:,}" for number in evaluated))
    table.add_row("the run", *(Text(estimated_duration(case.run), style="bold") for case in cases))
    return table


def _assumptions(plan: Plan) -> Iterator[str]:
    yield (
        "An estimate: operations and bytes counted, over the device's rates, by how far rpg was from them in "
        f"docs/speed-table.md. Prompts of {plan.prompt_tokens} tokens; rewards and checkpoints not counted."
    )
    if not plan.fits:
        yield f"Times are as if it fitted, with {IF_IT_FITTED} responses at a time."
    if plan.config.rollout.ahead:
        yield (
            f"rollout.ahead {plan.config.rollout.ahead:g} is not counted: times are those of steps that wait for their "
            "last response."
        )
    yield f"Device: {plan.device.source}."


def verdicts(plan: Plan) -> Iterator[tuple[bool | None, str]]:
    """(good, one line) for what is learnt, memory, disk and the folder; None: it cannot be known here."""
    for text in plan.objections:
        yield False, text
    used = plan.memory.peak / plan.device.memory
    if plan.fits:
        yield True, f"fits: {gb(plan.memory.peak)} of {gb(plan.device.memory)} GB ({used:.0%})"
        if text := offload_text(plan):
            yield None, text
    else:
        yield False, f"does not fit: {gb(plan.memory.peak)} GB, and {gb(plan.available)} are there; {way_out(plan)}"
    disk = plan.disk
    files = "config.yaml, metrics.jsonl, samples.jsonl, summary.json, report.html"
    if disk.holds_run:
        yield False, f"{disk.folder} holds a run already: give --resume to go on with it, or another --output"
    text = f"writes {disk.folder}: {files}"
    if disk.kept:
        text += f", checkpoints of {gb(disk.checkpoint)} GB each, {disk.kept} at most at a time"
    if disk.free is None:
        yield None, f"{text}: {gb(disk.needed)} GB of disk" if disk.kept else text
    elif plan.fits_disk:
        yield True, f"{text}; {gb(disk.free)} GB are free" if disk.kept else text
    else:
        yield False, f"{text}; {gb(disk.free)} GB are free: lower checkpoint.keep, or give another --output"


def refused(plan: Plan) -> bool:
    """Whether something in it is crossed."""
    return any(ok is False for ok, _ in verdicts(plan))


def offload_text(plan: Plan) -> str:
    """What was decided, and what it is worth; nothing where that is no question."""
    slots, other = plan.layout.slots, plan.otherwise.slots
    if plan.memory.offload:
        return (
            f"offload: {gb(plan.memory.moved)} GB lie in host memory while sampling, so {slots} responses at a time in "
            f"place of {other}; it takes {estimated_duration(plan.middle.seconds.offload)} a step"
        )
    if plan.device.cpu or plan.config.rollout.engine != "native":
        return ""
    return f"no offload: {slots} responses at a time, and {other} with it (optim.offload)"


def way_out(plan: Plan) -> str:
    """What to change first."""
    lowest = plan.memory.training - plan.memory.activations - (0 if plan.memory.offload else plan.memory.cache)
    several = "several GPUs: the same loss in TRL or verl"
    if plan.device.cpu:
        return "lower rollout.slots, or take a smaller model"
    if plan.config.reference.model is not None and lowest - plan.memory.reference <= plan.available:
        return f"a smaller reference.model; or --peft.method lora; or {several}"
    if plan.memory.reference and lowest - plan.memory.reference <= plan.available:
        return f"--reference.update old holds no second model; or --peft.method lora; or {several}"
    if plan.trained == plan.parameters and plan.memory.weights < plan.available:
        return f"--peft.method lora trains an adapter; or {several}"
    if lowest <= plan.available:
        return f"lower rollout.max_new_tokens, rollout.slots or optim.micro_tokens; or {several}"
    if not plan.packed and plan.memory.weights < 3 * plan.available and plan.config.peft.method in (None, "lora"):
        return f"--peft.method lora --peft.base_bits 4 holds the frozen weights in 4 bits; or {several}"
    return several
