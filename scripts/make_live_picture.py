"""docs/live.svg: the live view of `rpg train` at a step of a run, drawn by the view itself from the run's files.

rpg train --output runs/first
python scripts/make_live_picture.py runs/first
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from unittest.mock import patch

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from rpg.run.config import Config
from rpg.run.folder import read_rows
from rpg.run.panel import Panel
from rpg.run.rows import Example
from rpg.run.settings import build
from rpg.run.view import title_of

WEB_FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # what a picture in a page may not fetch


def panel_at(run: Path, step: int) -> Panel:
    """As it stood once this step was done; its clock goes by the times that the run measured."""
    config = build(Config, file=run / "config.yaml")
    rows = [row for row in read_rows(run / "metrics.jsonl", []) if row["step"] <= step]
    responses = [row for row in read_rows(run / "samples.jsonl", []) if row["step"] == step and row["solved"]]
    now = 0.0
    with patch("time.monotonic", lambda: now):
        panel = Panel(title_of(config), config.steps)
        for row in rows:
            now += row.get("time/step", 0.0)
            panel.step(row)
        panel.response(Example.of(max(responses, key=lambda row: int(row["length"]))))
    return panel


def picture(run: Path, step: int, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    panel = panel_at(run, step)
    elapsed = panel._timer.last
    with patch("time.monotonic", lambda: elapsed):
        console.print(panel)
    return console.export_svg(title="rpg train", code_format=WEB_FONT.sub("", CONSOLE_SVG_FORMAT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=36)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/live.svg"))
    args = parser.parse_args()
    args.output.write_text(picture(args.run, args.step, args.width), encoding="utf-8")


if __name__ == "__main__":
    main()
