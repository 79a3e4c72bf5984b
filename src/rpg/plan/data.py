"""What is known of a run's problems without loading them, and without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..console import choose
from ..rewards.importing import split_spec
from ..run.config import Config
from ..tasks.sources.builtin import BUILTIN
from ..tasks.sources.datasets import DATASETS, Split, dataset_name
from ..tasks.sources.files import SUFFIXES
from ..tasks.sources.gym import PREFIX, check
from ..tasks.sources.hub import HubId
from ..tasks.sources.mixture import parse

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
    guessed: bool  # with nothing to go by


def data_of(config: Config) -> Data:
    task, most = config.task, config.eval.problems
    names = [name for _, name in parse(task.name)]
    sizes = [rows_of(name) for name in names]
    rows = sum(size for size in sizes if size is not None) if None not in sizes else None
    tests: dict[str, int | None] = {}
    if task.test is not None:
        tests = {name: _tested(name) for part in task.test.split(",") if (name := part.strip())}
    else:
        for name, size in zip(names, sizes, strict=True):
            dataset = DATASETS.get(dataset_name(name) or "")
            if dataset is not None and dataset.test is not None:
                tests[dataset.test_name or dataset_name(name) or name] = _problems(dataset.test)
            elif size is not None:  # a tenth is held out
                tests[name] = size // HELD_OUT
                rows = None if rows is None else rows - size // HELD_OUT
            else:
                tests[name] = None
    if task.aside:
        tests, rows = {"aside": task.aside}, None if rows is None else rows - task.aside
    evaluated = sum(min(most, number or most) for number in tests.values())
    prompt = min(_prompt(config), config.rollout.max_prompt_tokens)
    return Data(task.name, rows, tests, evaluated, prompt, guessed=task.name not in BUILTIN)


def rows_of(name: str) -> int | None:
    """Rows to train on, of a file that is here or of a dataset that has a name; what cannot be had is a ValueError."""
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"no such file: {name}")
        return _count(path)
    if (dataset := dataset_name(name)) is not None:
        train = DATASETS[dataset].train
        if train is None:
            raise ValueError(f"task {name!r} has no problems to train on")
        return _problems(train)
    if name.startswith(PREFIX):
        check(name)
    elif ":" in name:
        split_spec(name)
    elif name not in BUILTIN and HubId.parse(name) is None:
        raise ValueError(choose("task", name, [*BUILTIN, *DATASETS]))
    return None


def _tested(name: str) -> int | None:
    dataset = DATASETS.get(dataset_name(name) or "")
    split = dataset and (dataset.test or dataset.train)
    return _problems(split) if split else rows_of(name)


def _problems(split: Split) -> int:
    return int(split.problems.replace(",", ""))


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
