"""A task by what ``task.name`` and ``task.test`` say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..console import choose
from ..rewards.importing import load_function
from ..rewards.signature import check_signature
from ..verify import verify_reward
from . import overlap
from .sources.builtin import BUILTIN
from .sources.datasets import DATASETS, dataset_name, load_split, prepare, row_of
from .sources.files import SUFFIXES, Columns, load_file, split
from .sources.gym import PREFIX, load_gym
from .sources.hub import HubId, load_hub
from .sources.mixture import SIGN, WEIGHTED, RewardByPart, TaggedProblems, finite, mix, parse, unused
from .task import Problem, Task

OTHERS = "a .jsonl, .json or .parquet file, org/name on the hub, gym:GENERATOR, or my_task.py:make"

FEW = 8  # problems of an endless stream that tell it from another


def load_task(
    name: str,
    seed: int = 0,
    test: str | None = None,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    look: bool = True,
) -> Task:
    """A built-in task; a dataset of ``rpg tasks``; a .jsonl, .json or .parquet file; ``org/name[@subset][#split]`` on
    the hub; ``gym:GENERATOR``; ``my_task.py:make``, a function that returns a Task; or several, as in
    ``0.7*gsm8k + 0.3*math``.

    ``test``: what to evaluate on instead of the task's own held-out problems, several with commas; where it is given,
    nothing of the data is held out. Test problems that are in the training set stay in both; ``notes`` says how many.
    """
    columns = Columns(prompt_key, answer_key)
    weights, names = zip(*parse(name), strict=True)
    tasks = [_load(part, seed, columns, whole=test is not None) for part in names]
    task = tasks[0] if len(tasks) == 1 else mix(tasks, weights, seed, names)
    if test is not None:
        task = _tested(task, test, seed, columns)
    if not look:  # for duplicates and overlap
        return task
    return replace(task, notes=(*task.notes, *overlap.notes(finite(task.train), task.tests)))


def fingerprint(task: Task) -> dict[str, list[Any]]:
    """[how many, hash] of the problems to train on, and of each test set under its name; of endless ones, the first
    few are looked at."""
    sets = {"": task.train, **task.tests}
    return {name: [len(problems), _hash([*finite(problems), *problems[:FEW]])] for name, problems in sets.items()}


def _hash(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        texts = problem.prompt, str(problem.answer), problem.level, problem.template, problem.system, problem.source
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()


def load_tests(test: str, seed: int = 0, prompt_key: str | None = None, answer_key: str | None = None) -> Task:
    """What there is to evaluate on, several with commas, and nothing to train on."""
    return _tested(Task(test, [], [], verify_reward), test, seed, Columns(prompt_key, answer_key))


def _load(name: str, seed: int, columns: Columns, whole: bool) -> Task:
    """With the held-out problems that it has or, of data, a tenth by hash; none if all of it is to be trained on."""
    task = _without_data(name, seed)
    if task is not None:
        return task
    data = _data(name, columns, want_test=not whole)
    train, test, notes = data.train, data.test, data.notes
    if whole:
        test = []
    elif train and not test:
        train, test = split(train)
        notes = [*notes, f"{data.name}: {len(test):,} problems of {len(train) + len(test):,} are held out"]
    elif data.test_name != data.name:
        return Task(data.name, train, {data.test_name: test}, verify_reward, notes=tuple(notes))
    return Task(data.name, train, test, verify_reward, notes=tuple(notes))


def _tested(task: Task, test: str, seed: int, columns: Columns) -> Task:
    """The task with other held-out problems, and a reward for each where they differ."""
    tests: dict[str, Sequence[Problem]] = {}
    owners = [task]
    tagged: dict[str, Sequence[Problem]] = {}
    for name in dict.fromkeys(filter(None, (part.strip() for part in test.split(",")))):
        if SIGN.search(name) or WEIGHTED.fullmatch(name):
            raise ValueError(f"task.test {name!r}: test sets are not mixed; write a, b instead of 0.5*a + 0.5*b")
        other = _test(name, seed, replace(columns, strict=False))
        if other.reward not in [owner.reward for owner in owners]:
            owners.append(other)
        part = [owner.reward for owner in owners].index(other.reward)
        for short, problems in other.tests.items():
            label = unused(tests, short, name)
            tests[label], tagged[label] = problems, TaggedProblems(problems, part, label)
        task = replace(task, notes=(*task.notes, *other.notes))
    if not tests:
        raise ValueError(f"task.test names nothing to evaluate on; got {test!r}")
    if len(owners) == 1:
        return replace(task, test=tests)
    return replace(
        task,
        train=TaggedProblems(task.train, 0, task.name),
        test=tagged,
        reward=RewardByPart([owner.reward for owner in owners]),
        trusted=all(owner.trusted for owner in owners),
        ask=None,
    )


def _test(name: str, seed: int, columns: Columns) -> Task:
    """What is to be evaluated on: the test problems, or all where there are no others."""
    task = _without_data(name, seed)
    if task is not None:
        return task
    data = _data(name, columns, want_train=False)
    problems = {data.test_name: data.test} if data.test else {data.name: data.train}
    return Task(data.name, [], problems, verify_reward, notes=tuple(data.notes))


def _without_data(name: str, seed: int) -> Task | None:
    """A task that is made from a seed or by a function; None if the name means data."""
    if name in BUILTIN:
        return BUILTIN[name](seed)
    if name.startswith(PREFIX):
        return load_gym(name, seed)
    if not _is_function(name):
        return None
    make = load_function(name)
    try:
        task = make()
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a rpg.tasks.Task; it returned {type(task).__name__}")
    check_signature(task.reward)
    return task


def _is_function(name: str) -> bool:
    return ":" in name and not name.endswith(SUFFIXES) and not name.startswith(PREFIX) and name not in BUILTIN


def made_by_functions(names: str) -> bool:
    """Whether a task.name or task.test has a part that is made by a user's function: loading it runs code."""
    parts = [part.strip() for some in (SIGN.split(names), names.split(",")) for part in some]
    weighted = (WEIGHTED.fullmatch(part) for part in parts)
    return any(map(_is_function, [*parts, *(match[2].strip() for match in weighted if match)]))


class _Data(NamedTuple):
    name: str  # short
    train: list[Problem]
    test_name: str
    test: list[Problem]
    notes: list[str]


def _data(name: str, columns: Columns, *, want_train: bool = True, want_test: bool = True) -> _Data:
    """What is not wanted is not loaded where it lies apart."""
    listed = dataset_name(name)
    if listed is not None:
        row = DATASETS[listed]
        test_name = row.test_name or listed
        train, notes = load_split(listed, row.train) if row.train and (want_train or not row.test) else ([], [])
        test, more = load_split(test_name, row.test) if row.test and want_test else ([], [])
        return _Data(listed, train, test_name, test, notes + more)
    if name.endswith(SUFFIXES) or Path(name).exists() or name.startswith((".", "/", "~")):
        short = Path(name).stem
        train, notes = prepare(short, *load_file(name, columns))
        return _Data(short, train, short, [], notes)
    where = HubId.parse(name)
    if where is None:
        several = "; several: 0.7*gsm8k + 0.3*math, with spaces around the +" if set("+*") & set(name) else ""
        raise ValueError(f"{choose('task', name, [*BUILTIN, *DATASETS])}; or {OTHERS}{several}")
    train, test, lacking = load_hub(where, columns)
    short, table_row = where.repo.partition("/")[2], row_of(where.repo)
    template = table_row.template if table_row else None
    train, notes = prepare(short, train, lacking, template=template)
    test, more = prepare(short, test, template=template)
    return _Data(short, train, short, test, notes + more)
