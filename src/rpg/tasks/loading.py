"""A task by what ``task.name`` and ``task.test`` say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..console import choose
from ..rewards.importing import load_function
from ..verify import verify_reward
from . import overlap
from .sources.builtin import BUILTIN
from .sources.datasets import DATASETS, dataset_name, load_split, prepare, row_of
from .sources.files import SUFFIXES, load_file, split
from .sources.gym import PREFIX, load_gym
from .sources.hub import HubId, load_hub
from .sources.mixture import SIGN, WEIGHTED, ByPart, Marked, finite, mix, parse, unused
from .task import Problem, Task

OTHERS = "a .jsonl, .json or .parquet file, org/name on the hub, gym:GENERATOR, or my_task.py:make"


@dataclass(frozen=True)
class Keys:
    """Columns of files and hub datasets, where they are not the usual ones."""

    prompt: str | None = None
    answer: str | None = None


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
    keys = Keys(prompt_key, answer_key)
    parts = parse(name)
    tasks = [_load(part, seed, keys, whole=test is not None) for _, part in parts]
    weights, given = zip(*parts, strict=True)
    task = tasks[0] if len(tasks) == 1 else mix(tasks, weights, seed, given)
    if test is not None:
        task = _tested(task, test, seed, keys)
    if not look:  # for duplicates and overlap
        return task
    return replace(task, notes=(*task.notes, *overlap.notes(finite(task.train), task.tests)))


def load_tests(test: str, seed: int = 0, prompt_key: str | None = None, answer_key: str | None = None) -> Task:
    """What there is to evaluate on, several with commas, and nothing to train on."""
    return _tested(Task(test, [], [], verify_reward), test, seed, Keys(prompt_key, answer_key))


def _load(name: str, seed: int, keys: Keys, whole: bool) -> Task:
    """With the held-out problems that it has or, of data, a tenth by hash; none if all of it is to be trained on."""
    made = _made(name, seed)
    if made is not None:
        return made
    short, train, test, notes = _data(name, keys, strict=True, want_test=not whole)
    tests: Sequence[Problem] | dict[str, Sequence[Problem]] = [] if whole else test[1]
    if not whole and train and not test[1]:
        train, held_out = split(train)
        notes.append(f"{short}: {len(held_out):,} problems of {len(train) + len(held_out):,} are held out")
        tests = held_out
    elif not whole and test[0] != short:
        tests = {test[0]: test[1]}
    return Task(short, train, tests, verify_reward, notes=tuple(notes))


def _tested(task: Task, test: str, seed: int, keys: Keys) -> Task:
    """The task with other held-out problems, and a reward for each where they differ."""
    tests: dict[str, Sequence[Problem]] = {}
    owners = [task]
    marked: dict[str, Sequence[Problem]] = {}
    for given in dict.fromkeys(filter(None, (part.strip() for part in test.split(",")))):
        if SIGN.search(given) or WEIGHTED.fullmatch(given):
            raise ValueError(f"task.test {given!r}: test sets are not mixed; write a, b instead of 0.5*a + 0.5*b")
        other = _test(given, seed, keys)
        if other.reward not in [owner.reward for owner in owners]:
            owners.append(other)
        part = [owner.reward for owner in owners].index(other.reward)
        for short, problems in other.tests.items():
            label = unused(tests, short, given)
            tests[label], marked[label] = problems, Marked(problems, part, label)
        task = replace(task, notes=(*task.notes, *other.notes))
    if not tests:
        raise ValueError(f"task.test names nothing to evaluate on; got {test!r}")
    if len(owners) == 1:
        return replace(task, test=tests)
    return replace(
        task,
        train=Marked(task.train, 0, task.name),
        test=marked,
        reward=ByPart([owner.reward for owner in owners]),
        trusted=all(owner.trusted for owner in owners),
    )


def _test(name: str, seed: int, keys: Keys) -> Task:
    """What is to be evaluated on: the test problems, or all where there are no others."""
    made = _made(name, seed)
    if made is not None:
        return made
    short, train, test, notes = _data(name, keys, strict=False, want_train=False)
    problems = {test[0]: test[1]} if test[1] else {short: train}
    return Task(short, [], problems, verify_reward, notes=tuple(notes))


def _made(name: str, seed: int) -> Task | None:
    """A task that is no data."""
    if name in BUILTIN:
        return BUILTIN[name](seed)
    if name.startswith(PREFIX):
        return load_gym(name, seed)
    if name.endswith(SUFFIXES) or ":" not in name:
        return None
    make = load_function(name)
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Task):
        raise ValueError(f"{name} must return a rpg.tasks.Task; it returned {type(made).__name__}")
    return made


def _data(
    name: str, keys: Keys, *, strict: bool, want_train: bool = True, want_test: bool = True
) -> tuple[str, list[Problem], tuple[str, list[Problem]], list[str]]:
    """(short name, train, (name, test), notes); what is not wanted is not loaded where it lies apart."""
    known = dataset_name(name)
    given = {"prompt_key": keys.prompt, "answer_key": keys.answer}
    if known is not None:
        row = DATASETS[known]
        test_name = row.test_name or known
        train, notes = load_split(known, row.train) if row.train and (want_train or not row.test) else ([], [])
        test, more = load_split(test_name, row.test) if row.test and want_test else ([], [])
        return known, train, (test_name, test), notes + more
    if name.endswith(SUFFIXES) or Path(name).exists() or name.startswith((".", "/", "~")):
        short = Path(name).stem
        train, notes = prepare(short, *load_file(name, **given, strict=strict))
        return short, train, (short, []), notes
    where = HubId.parse(name)
    if where is None:
        several = "; several: 0.7*gsm8k + 0.3*math, with spaces around the +" if set("+*") & set(name) else ""
        raise ValueError(f"{choose('task', name, [*BUILTIN, *DATASETS])}; or {OTHERS}{several}")
    found = load_hub(where, **given, strict=strict)
    short = where.repo.partition("/")[2]
    listed = row_of(where.repo)
    template = listed.template if listed else None
    train, notes = prepare(short, found.train, found.lacking, template=template)
    test, more = prepare(short, found.test, template=template)
    return short, train, (short, test), notes + more
