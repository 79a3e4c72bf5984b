"""The datasets that have a name: from the folder that RPG_DATA names, else from the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..overlap import merge, wrapped
from ..task import Problem
from ..templates import WRAPPED
from .files import SUFFIXES, load_file
from .hub import HubId, load_hub

FOLDER = "RPG_DATA"
CJK = re.compile(r"[\u3400-\u9fff]")  # Chinese characters


@dataclass(frozen=True)
class Split:
    hub: str
    files: tuple[str, ...]  # names in RPG_DATA, blind to case, -, _ and the suffix; the first is the one to suggest
    problems: str  # how many there are


@dataclass(frozen=True)
class Dataset:
    about: str
    train: Split | None = None
    test: Split | None = None
    test_name: str | None = None  # where the test set is a dataset with a name of its own
    template: str = "boxed"  # of prompts that do not say themselves how to answer
    keep: Callable[[Problem], bool] | None = None
    response: int = 2048  # tokens that hold nearly every solution of a model that does not think first


def _english(problem: Problem) -> bool:
    return CJK.search(problem.prompt) is None


MATH_500 = Split("HuggingFaceH4/MATH-500#test", ("math-500", "math-500-test"), "500")
DAPO = Split("BytedTsinghua-SIA/DAPO-Math-17k#train", ("dapo-math-17k", "dapo-math-17k-train"), "17,301")

DATASETS = {
    "gsm8k": Dataset(
        "grade-school word problems (Cobbe et al. 2021), MIT",
        Split("openai/gsm8k@main#train", ("gsm8k-train",), "7,473"),
        Split("openai/gsm8k@main#test", ("gsm8k-test",), "1,319"),
        response=1024,
    ),
    "math": Dataset(
        "MATH's training problems (Hendrycks et al. 2021), levels 1–5, MIT; tested on math-500",
        Split("DigitalLearningGmbH/MATH-lighteval#train", ("math-train",), "7,500"),
        MATH_500,
        "math-500",
    ),
    "math-500": Dataset("500 of MATH's test problems (Lightman et al. 2023), MIT", test=MATH_500),
    "dapo-math-17k": Dataset(
        "competition problems with whole-number answers, a fifth in Chinese (Yu et al. 2025), Apache-2.0",
        DAPO,
        template="answer",
    ),
    "dapo-math-17k-en": Dataset(
        "its problems without Chinese characters", replace(DAPO, problems="14,058"), template="answer", keep=_english
    ),
    "aime24": Dataset(
        "AIME I and II of 2024 (Mathematical Association of America)",
        test=Split("HuggingFaceH4/aime_2024#train", ("aime24", "aime-2024", "aime24-test"), "30"),
    ),
    "aime25": Dataset(
        "AIME I and II of 2025 (Mathematical Association of America)",
        test=Split("math-ai/aime25#test", ("aime25", "aime-2025", "aime25-test"), "30"),
    ),
    "amc23": Dataset(
        "AMC 12 of 2023 (Mathematical Association of America)",
        test=Split("math-ai/amc23#test", ("amc23", "amc-2023", "amc23-test"), "40"),
    ),
    "minerva-math": Dataset(
        "university science and mathematics (Lewkowycz et al. 2022)",
        test=Split("math-ai/minervamath#test", ("minerva-math", "minerva", "minerva-math-test"), "272"),
    ),
    "olympiadbench": Dataset(
        "olympiad mathematics in English, without pictures (He et al. 2024), Apache-2.0",
        test=Split("Hothan/OlympiadBench@OE_TO_maths_en_COMP#train", ("olympiadbench", "olympiad-bench"), "674"),
    ),
}
SPELLINGS = {"math500": "math-500", "aime2024": "aime24", "aime2025": "aime25", "minervamath": "minerva-math"}


def dataset_name(given: str) -> str | None:
    """gsm8k of GSM8K, gsm-8k, gsm_8k; None if it is no dataset of the table."""
    names = {_plain(name): name for name in DATASETS} | SPELLINGS
    return names.get(_plain(given))


def row_of(repo: str) -> Dataset | None:
    """The dataset of the table that this repository of the hub holds."""
    for row in DATASETS.values():
        ids = [HubId.parse(split.hub) for split in (row.train, row.test) if split is not None]
        if repo in [where.repo for where in ids if where is not None]:
            return row
    return None


def load_split(name: str, split: Split) -> tuple[list[Problem], list[str]]:
    """(problems, notes)"""
    row = DATASETS[name]
    path = _local(split)
    if path is not None:
        problems, lacking = load_file(path)
    else:
        where = HubId.parse(split.hub)
        assert where is not None
        try:
            train, test, lacking = load_hub(where)
        except ValueError as error:
            folder = os.environ.get(FOLDER)
            hint = f" ({FOLDER}={folder} holds no {split.files[0]}.jsonl, .json or .parquet)" if folder else ""
            raise ValueError(f"{name}: {error}{hint}") from error
        problems = train or test
    return prepare(name, problems, lacking, template=row.template, keep=row.keep)


def prepare(
    name: str,
    problems: list[Problem],
    lacking: int = 0,
    *,
    template: str | None = None,
    keep: Callable[[Problem], bool] | None = None,
) -> tuple[list[Problem], list[str]]:
    """(problems, notes): copies are merged, and each gets its template and its source."""
    notes = [f"{name}: {lacking:,} rows without an answer are left out"] if lacking else []
    chosen = problems if keep is None else [problem for problem in problems if keep(problem)]
    unique, copies = merge(chosen)
    if copies:
        notes.append(f"{name}: {len(chosen):,} rows are {len(unique):,} problems: copies are merged")
    usual = template or "plain"
    return [replace(p, template=WRAPPED if wrapped(p.prompt) else usual, source=name) for p in unique], notes


def _local(split: Split) -> Path | None:
    """Its file in the folder of RPG_DATA."""
    name = os.environ.get(FOLDER)
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{FOLDER} must be a folder with files of data; there is no folder {name}")
    wanted = {_plain(name) for name in split.files}
    files = [path for path in sorted([*folder.glob("*"), *folder.glob("*/*")]) if path.suffix in SUFFIXES]
    fitting = [path for path in files if _plain("".join(path.relative_to(folder).with_suffix("").parts)) in wanted]
    if len(fitting) > 1:
        both = " and ".join(str(path.relative_to(folder)) for path in fitting[:2])
        raise ValueError(f"{FOLDER} holds both {both}: give one of them by its path instead")
    return fitting[0] if fitting else None


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())
