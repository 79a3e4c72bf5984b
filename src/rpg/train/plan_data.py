"""What is known of a run's problems without loading them, and without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..names import choose
from ..tasks.builtin import BUILTIN
from ..tasks.datasets import DATASETS, dataset_name
from .config import Config

FILES = (".jsonl", ".json", ".parquet")
HELD_OUT = 10  # of a file without a test set, one row in so many
PROMPT = 256  # tokens, where nothing is known
CHARACTERS = 3  # to a token, of text


@dataclass(frozen=True)
class Data:
    name: str
    rows: int | None  # to train on; None: not known, or endless
    tests: dict[str, int | None]  # held-out sets and their rows
    evaluated: int  # problems of one evaluation
    prompt: int  # tokens, assumed


def data_of(config: Config) -> Data:
    task, most = config.task, config.eval.problems
    rows = rows_of(task.name)
    if task.test is not None:
        tests = {name: rows_of(name, test=True) for name in (part.strip() for part in task.test.split(","))}
    elif rows is not None and task.name.endswith(FILES):
        tests, rows = {task.name: rows // HELD_OUT}, rows - rows // HELD_OUT
    else:
        tests = {task.name: rows_of(task.name, test=True)}
    evaluated = sum(min(most, number or most) for number in tests.values())
    prompt = min(_prompt(config), config.rollout.max_prompt_tokens)
    return Data(task.name, rows, tests, evaluated, prompt)


def rows_of(name: str, test: bool = False) -> int | None:
    """Rows of a file that is here, or of a dataset that has a name; a name that means nothing is a ValueError."""
    if name.endswith(FILES) and name.count("*") == 0:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"no such file: {name}")
        return _count(path)
    if (known := dataset_name(name)) is not None:
        split = DATASETS[known].test if test else DATASETS[known].train or DATASETS[known].test
        return None if split is None else int(split.problems.replace(",", ""))
    if name not in BUILTIN and not any(mark in name for mark in ":/*+"):
        raise ValueError(choose("task", name, [*BUILTIN, *DATASETS]))
    return None


def _count(path: Path) -> int | None:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    with path.open(encoding="utf-8") as file:
        return sum(1 for line in file if line.strip()) if path.suffix == ".jsonl" else None


def _prompt(config: Config) -> int:
    """Tokens of a prompt: of a built-in task those of some, else a guess."""
    if config.task.name not in BUILTIN:
        return PROMPT
    some = BUILTIN[config.task.name](config.seed).train[:32]
    characters = sum(len(problem.prompt) for problem in some) / len(some)
    return max(1, round(characters if config.model == "builtin" else characters / CHARACTERS))
