"""A plan for a thousand GPUs, on paper: the tables of docs/scale.md.

    python docs/scale/calculator.py                 # as they stand there
    python docs/scale/calculator.py --device h100   # the times of another GPU
    python docs/scale/calculator.py --write         # into that page

Here are the rows; the page has the formulas above them. In code these are in pieces.py (model, network, lengths, drift)
and schedule.py (memory, communication, time); settings.py turns a plan into verl's settings.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path

from pieces import DENSE, H20, MIXTURE, MODELS, QWEN25_7B, SMALL, Job, Lengths, Model, clipped, drift, ess, reach
from schedule import Layout, Plan, Rollout, Training, best, engines, fastest, layouts
from settings import overrides

from rpg.costs.devices import DEVICES, Device

CONTEXTS, GPUS = (8192, 16384, 32768), (64, 256, 1024)
H100, H200 = DEVICES["h100"], DEVICES["h200"]
MEDIANS = 4449, 6379  # of lengths whose means below 4K and 8K are 3,206 and 5,671
SETTINGS = "### Settings of verl"
Rows = Iterable[Sequence[object]]
TABLES: dict[str, Callable[[Device], Rows]] = {}
PAGE = Path(__file__).parents[1] / "scale.md"


def table(title: str) -> Callable[[Callable[[Device], Rows]], Callable[[Device], Rows]]:
    """The rows that stand under this heading of the page; its formulas and the names of its columns are there."""
    return lambda rows: TABLES.setdefault(title, rows)


def k(tokens: int) -> str:
    return f"{tokens // 1024}K"


def gb(number: float) -> str:
    return f"{number / 1e9:,.1f}" if number < 1e11 else f"{number / 1e9:,.0f}"


def s(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 20 else f"{seconds:.1f}" if seconds >= 2 else f"{seconds:.2f}"


def small(number: float) -> str:
    return f"{number:.2g}" if number >= 1e-4 else "0" if number < 1e-99 else f"{number:.0e}"


@table("What the models are")
def models(device: Device) -> Rows:
    for m in MODELS:
        n, active = m.counts, m.counts.body + m.counts.head
        operations = [f"{n.train_flops(1, 1, 0, c, shared=False) / c / 1e9:.0f}" for c in CONTEXTS]
        yield [m.name, f"{m.parameters:,}", f"{active / 1e9:.2f}", f"{n.kv_bytes:,}", *operations]


@table("Memory of training")
def memory(device: Device) -> Rows:
    for m in MODELS:
        for c in CONTEXTS:
            state = [gb(n * m.parameters) for n in (2, 4, 12)]
            activations = [gb(c * m.activation(logits)) for logits in (False, True)]
            yield [m.name, k(c), *state, *activations, least(m, H100, c), least(m, H200, c)]


def least(model: Model, device: Device, context: int) -> str:
    """The fewest GPUs, and how a sequence is shared there."""
    ways = (lay for i in range(11) for lay in layouts(model, 2**i) if lay.fits(model, device, context))
    lay = min(ways, key=lambda lay: (lay.gpus, lay.sequence, lay.pipeline))
    experts = f", EP {lay.expert} PP {lay.pipeline}" if lay.shard is None else ""
    return f"{lay.gpus}" + (f" × SP {lay.sequence}" if lay.sequence > 1 else "") + experts


@table("KV cache and decoding")
def cache(device: Device) -> Rows:
    for m in MODELS:
        for name in ("h100", "h200"):
            e = engines(m, DEVICES[name], 64, Job(Lengths(CONTEXTS[0])))
            size = f"{e.tensor}" + (f": TP {e.split}, EP {e.tensor}" if m.experts > 1 else "")
            full, alone = e.step(e.slots), e.step(1)
            speed = [e.slots, f"{1e3 * full:.0f}", f"{e.slots / full / e.tensor:,.0f}", f"{1e3 * alone:.1f}"]
            yield [m.name, name.upper(), size, *(f"{e.sequences(c):,}" for c in CONTEXTS), *speed]


@table("Communication")
def communication(device: Device) -> Rows:
    job = Job(Lengths(CONTEXTS[0]))
    for t in filter(None, [best(m, device, gpus, job) for m in MODELS for gpus in GPUS]):
        m, lay, engine = t.model, t.layout, engines(t.model, device, t.layout.gpus, job)
        whole = replace(t, layout=Layout(lay.gpus, lay.gpus))  # FSDP over all GPUs
        token = t.compute() / (t.rows * job.lengths.sequence / lay.sharing)
        hidden = ("" if lay.shard else "FSDP: ") + f"{whole.shards() / whole.micro_batches / token:,.0f}"
        moved = 8 * m.parameters * t.micro_batches if lay.shard else 6 * m.parameters / lay.expert / lay.pipeline
        sync = [s(Plan(engine, t, how).sync) for how in ("together", "one-off")]
        row = m.name, lay.gpus, lay.shard or "Megatron", f"{lay.sequence}, {lay.expert}, {lay.pipeline}", s(t.compute())
        yield [*row, gb(moved), s(t.shards()), hidden, s(t.replicas()), s(t.exchanges()), *sync]


@table("Lengths")
def lengths(device: Device) -> Rows:
    for c in CONTEXTS:
        at, job = Lengths(c), Job(Lengths(c))
        numbers = [f"{n:,.0f}" for n in (at.age, at.longest(16), at.longest(job.sampled))]
        tokens = [f"{n * at.mean / 1e6:.0f}" for n in (job.kept * job.sampled, job.sampled)]
        times = f"{at.longest(job.sampled) / at.mean:.1f}"
        yield [k(c), f"{at.mean:,.0f}", f"{1 - at.below(c):.0%}", *numbers, times, *tokens]


@table("The step")
def step(device: Device) -> Rows:
    for m, c, gpus in ((m, c, gpus) for m in MODELS for c in CONTEXTS for gpus in GPUS):
        job = Job(Lengths(c))
        here, off, stream = (fastest(m, device, gpus, job, how) for how in ("together", "one-off", "streaming"))
        row, rest = ["does not fit", *"––––"], [*"–––––"]
        if here:
            row = [s(here.rollout.seconds()), s(here.training.seconds()), s(here.seconds)]
            row += [f"{here.idle:.0%}", f"{here.seconds * job.steps / 86400:.1f}"]
        if off and stream:
            lags = stream.lag(job.lengths.mean, 0.5), stream.lag(stream.rollout.longest, 1)
            rest = [f"{off.rollout.gpus}, {stream.rollout.gpus}", s(off.seconds), s(stream.seconds)]
            rest += [f"{lag:.1f}" for lag in lags]
        yield [m.name, k(c), gpus, *row, *rest]


@table("Staleness")
def staleness(device: Device) -> Rows:
    tokens = Lengths(CONTEXTS[0]).mean
    for steps in (1, 8, 16, 32, 64, 128):
        row = [f"{steps} ({steps / 16:g})"]
        for kl in (drift(steps), drift(steps, straight=True)):
            row += [small(kl), f"{ess(kl):.3f}", small(clipped(kl)), small(ess(kl, tokens)), f"{reach(kl):,.0f}"]
        yield row


@table("Mismatch of trainer and engine")
def mismatch(device: Device) -> Rows:
    for kl in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        tokens = f"{ess(kl):.4f}", small(clipped(kl, 0.0001, 2.0)), f"{reach(kl):,.0f}"
        yield [f"{kl:.0e}", f"{sqrt(2 * kl):.3f}", *tokens, *(small(ess(kl, c)) for c in CONTEXTS)]


@table("The plan beside what others published")
def checks(device: Device) -> Rows:
    for what, published, plan in comparisons():
        yield [what, s(published), s(plan), f"{published / plan:.1f}"]


def comparisons() -> Iterable[tuple[str, float, float]]:
    """Training alone [1]; decoding alone [2]; whole steps [3], without dynamic sampling, engines of their sizes."""
    even = Job(Lengths(4095, median=1e9, spread=0.01, prompt=1), prompts=2048, samples=1, minibatch=2048, kept=1.0)
    update = trained(MIXTURE, 256, even).update()
    yield "Qwen3-235B, 256 H100, one update on 2,048 × 4,096 tokens [1]", 17.6, update
    tail = 28672 * Rollout(QWEN25_7B, H20, 128, 1, Job(Lengths(28672), kept=1.0)).step(1)
    yield "Qwen2.5-7B, 128 H20, a 28K response alone; published: rollout of a step [2]", 177.85, tail
    short = Job(Lengths(4096, MEDIANS[0]), prompts=64, samples=32, minibatch=16, kept=1.0)
    long = Job(Lengths(8192, MEDIANS[1]), prompts=16, samples=32, minibatch=16, kept=1.0)
    for m, job, gpus, tensor, how, published in (
        (DENSE, short, 32, 4, "together", 393.0),
        (MIXTURE, long, 128, 16, "together", 506.0),
        (DENSE, short, 32, 4, "one-off", 215.0),  # and as many to sample
        (MIXTURE, long, 128, 8, "one-off", 241.0),
    ):
        plan = Plan(Rollout(m, H100, gpus, tensor, job), trained(m, gpus, job), how)
        total = gpus if how == "together" else 2 * gpus
        yield f"{m.name}, {total} H100, step, {how} [3]", published, plan.seconds


def trained(model: Model, gpus: int, job: Job) -> Training:
    training = best(model, H100, gpus, job)
    assert training is not None
    return training


def plans() -> Iterable[tuple[str, Plan]]:
    """Those whose settings are written out."""
    for m, device, gpus, limit, how in (
        (SMALL, "h100", 64, 8192, "together"),
        (DENSE, "h200", 256, 16384, "together"),
        (MIXTURE, "h200", 1024, 32768, "streaming"),
    ):
        plan = fastest(m, DEVICES[device], gpus, Job(Lengths(limit)), how)
        assert plan is not None
        yield f"{m.name}, {k(limit)}, {gpus} {device.upper()}, {how}", plan


def filled(page: str, device: Device = H200) -> str:
    """The page with the rows and the settings as they are now."""
    for title, rows in TABLES.items():
        text = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows(device))
        above = rf"(### {title}\n\n(?:(?!#|\|).*\n)+\|.+\n[| -]+\n)"  # heading, formulas, columns
        page, found = re.subn(above + r"(?:\|.*\n)*", lambda match: match[1] + text, page)
        assert found == 1, f"the page has no table under the heading {title}"
    page = page.split(f"{SETTINGS}\n")[0] + f"{SETTINGS}\n"
    for title, plan in plans():
        lines = ["python -m verl.trainer.main_ppo", *overrides(plan, f"Qwen/{plan.training.model.name}")]
        page += f"\n{title}:\n\n```sh\n" + " \\\n  ".join(lines) + "\n```\n"
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The tables of docs/scale.md.")
    parser.add_argument("--device", choices=("h100", "h200"), default="h200", help="GPU of the tables with times")
    parser.add_argument("--write", action="store_true", help="into docs/scale.md (for an H200)")
    options, text = parser.parse_args(), PAGE.read_text(encoding="utf-8")
    if options.write:
        PAGE.write_text(filled(text), encoding="utf-8")
    else:
        device = DEVICES[options.device]
        print(filled(text.split("## Tables\n\n")[1], device).replace(H200.name, device.name), end="")
