"""The sections in their order: each measures, adds its rows, and does not end the others when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter

import torch

from ..costs.operations import Ceilings
from .logp import logp_section
from .rollout import rollout_section
from .scaling import scaling_section
from .synthetic import Sizes
from .table import BenchReport, BenchRow, Quantity, Section
from .timing import Watch, error_line, fresh, machine, measure_ceilings
from .train import train_section
from .whole import step_section

SECTIONS: dict[str, Callable[[Sizes, Ceilings, Watch], Section]] = {
    "rollout": rollout_section,
    "logp": logp_section,
    "train": train_section,
    "step": step_section,
    "scaling": scaling_section,
}
CEILING_COLUMNS = (
    Quantity("TFLOP/s", "of a square product of random matrices, two operations a multiplication", ",.4g"),
    Quantity("GB/s", "of a copy, bytes read and bytes written", ",.5g"),
)


def run_suite(parts: tuple[str, ...], sizes: Sizes, watch: Watch, save: Callable[[BenchReport], None]) -> BenchReport:
    """``save`` is called after every section."""
    report = BenchReport(machine(sizes.device, torch.get_num_threads()), asdict(sizes))
    watch("ceilings")
    begin = perf_counter()
    ceilings = measure_ceilings(sizes)
    about = f"A product of {sizes.matmul}³ in {sizes.dtype} and a copy of {sizes.copy / 2**30:.3g} GiB; medians."
    row = BenchRow("measured", {"TFLOP/s": ceilings.flops / 1e12, "GB/s": ceilings.bytes / 1e9})
    report.sections.append(
        Section("ceilings", "Ceilings of the machine", CEILING_COLUMNS, about, [row], perf_counter() - begin)
    )
    for part in parts:
        fresh(sizes.device)
        begin = perf_counter()
        try:
            section = SECTIONS[part](sizes, ceilings, watch)
        except Exception as error:
            section = Section(part, part, (), error=error_line(error))
        section.seconds = perf_counter() - begin
        report.sections.append(section)
        save(report)
    return report
