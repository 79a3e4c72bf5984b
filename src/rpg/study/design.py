"""What a study is: a YAML file, checked, and the runs that it asks for. Nothing is loaded or started here."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ..console import nearest, number
from ..loss.methods import algorithms
from ..run.auto import refuse_ruin, settled
from ..run.config import Config, Count, Natural, Positive, Share
from ..run.folder import RUNS
from ..run.settings import Bound, build, change, check_bounds, flat, options_of
from ..secrets import instead, secrets_in
from ..training.setup import method_of, task_of
from ..yaml_text import read_yaml

ENOUGH = 10**6  # steps of a run that minutes or tokens end
TUNING_SEED = 1000  # the first: no compared run has a seed that its settings were chosen with
MULTIPLE = re.compile(r"x([0-9.]+(?:e[-+]?[0-9]+)?)")
OURS = ("steps", "minutes", "tokens", "seed", "output", "task.aside")  # decided by the study itself
NO_MATTER = (
    "output",
    "device",
    "insist",
    "log.",
    "checkpoint.",
    "rollout.slots",
    "optim.micro_tokens",
    "optim.offload",
)
BUDGETS = ("steps", "minutes", "tokens")
OF_TASK = ("task.name", "task.test", "eval.k", "eval.problems", "eval.temperature", "eval.top_p")


@dataclass(frozen=True)
class BudgetConfig:
    steps: Count | None = None
    """batches of rollouts of each run"""
    tokens: Count | None = None
    """tokens of responses sampled for training, those of dropped groups included"""
    minutes: Positive | None = None
    """minutes of steps, without evaluations and checkpoints: only with jobs 1 is that a fair comparison"""


@dataclass(frozen=True)
class StudyConfig:
    base: str | None = None
    """a recipe, relative to the study's file; None: the defaults of rpg train"""
    set: dict[str, Any] = field(default_factory=dict)
    """settings that all runs share, over the recipe's"""
    compare: dict[str, Any] = field(default_factory=dict)
    """what is compared: settings by name; a list of methods is short for their names"""
    grid: dict[str, Any] = field(default_factory=dict)
    """conditions in each of which it is compared: a setting and its values, or a name and settings by label"""
    against: str | None = None
    """one of compare: the others are compared with it alone; None: all with each other"""
    seeds: Annotated[int, Bound("from 1 to 100", lambda x: 1 <= x <= 100)] = 5
    """of each arm: 0, 1, …"""
    tune: dict[str, Any] = field(default_factory=dict)
    """settings and the values to try, for each arm; x0.5 is a multiple of the arm's own"""
    tune_seeds: Annotated[int, Bound("from 1 to 100", lambda x: 1 <= x <= 100)] = 1
    """runs for each value tried"""
    tune_problems: Count = 128
    """problems that values are chosen by: of the training set, and taken out of it in these runs"""
    budget: BudgetConfig = BudgetConfig()
    jobs: Count = 1
    """runs at a time, on one machine and one GPU"""
    target: Share | None = None
    """an accuracy: time and tokens until a run's evaluation first reaches it"""
    test_set: str | None = None
    """the test set that decides, where there are several; None: the mean over all"""
    keep_checkpoints: bool = False
    """of finished runs; they take the most room"""
    retries: Natural = 1
    """times that a run is resumed which the system killed"""

    other_names: ClassVar[dict[str, str]] = {
        "compare": "arms methods algorithms",
        "set": "settings flags common",
        "seeds": "num_seeds repeats",
        "tune": "sweep search",
        "jobs": "parallel workers",
        "test_set": "on test benchmark",
        "budget.steps": "steps",
        "budget.tokens": "tokens",
        "budget.minutes": "minutes",
    }


@dataclass(frozen=True)
class Arm:
    """One of ``compare`` in one condition of ``grid``: what its runs share but the seed and what is tuned."""

    method: str
    condition: str  # "" where there is no grid
    config: Config
    settings: dict[str, Any]  # that are its own

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.method, self.condition) if part)

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.+-]+", "-", self.name).strip("-.") or "arm"


@dataclass(frozen=True)
class PlannedRun:
    arm: Arm
    part: str  # compare or tune
    seed: int
    config: Config  # its output is relative to the study's folder
    tried: dict[str, Any]  # what is tuned, and its value in this run

    @property
    def id(self) -> str:
        return self.config.output

    @property
    def title(self) -> str:
        tried = "".join(f", {name} {number(x) if isinstance(x, float) else x}" for name, x in self.tried.items())
        return f"{self.arm.name}, seed {self.seed}{tried}"

    @property
    def digest(self) -> str:
        """Of the settings that make its numbers."""
        values = {path: x for path, x in flat(settled(self.config)).items() if not path.startswith(NO_MATTER)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    name: str
    file: Path
    config: StudyConfig
    arms: tuple[Arm, ...]
    candidates: tuple[dict[str, Any], ...]  # of what is tuned, as the file has them

    @property
    def default_folder(self) -> Path:
        return RUNS / f"study-{self.name}"

    def tried(self, arm: Arm, candidate: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a candidate for this arm: multiples are of its own."""
        own = flat(settled(arm.config))
        return {path: _value(x, own[path]) for path, x in candidate.items()}

    @cached_property
    def tuning(self) -> tuple[PlannedRun, ...]:
        """In the order of what they decide: all values of all arms at the first seed."""
        return tuple(self._tuning())

    def _tuning(self) -> Iterator[PlannedRun]:
        order = itertools.product(range(self.config.tune_seeds), enumerate(self.candidates), self.arms)
        for i, (place, candidate), each in order:
            tried, seed = self.tried(each, candidate), TUNING_SEED + i
            where = {"output": f"tune/{each.slug}/{place}-seed-{seed}", "seed": seed}
            more = {"task.aside": self.config.tune_problems, "eval.problems": self.config.tune_problems}
            yield PlannedRun(each, "tune", seed, change(each.config, tried | where | more), tried)

    def compared(self, chosen: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[PlannedRun]:
        """``chosen``: what tuning has found, by the arm's name; an arm that has nothing yet has the file's first."""
        for seed, arm in itertools.product(range(self.config.seeds), self.arms):
            known = (chosen or {}).get(arm.name)
            tried = dict(known if known is not None else self.tried(arm, self.candidates[0]) if self.candidates else {})
            where = {"output": f"runs/{arm.slug}/seed-{seed}", "seed": seed}
            yield PlannedRun(arm, "compare", seed, change(arm.config, tried | where), tried)

    @property
    def planned(self) -> int:
        return len(self.arms) * (self.config.seeds + len(self.candidates) * self.config.tune_seeds)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_study(file: Path) -> Study:
    """A mistake is a ValueError of one line that names the file."""
    try:
        data = read_yaml(file)
        if isinstance(methods := data.get("compare"), list):
            data = {**data, "compare": {str(name): None for name in methods}}
        for name in ("set", "compare", "grid", "tune", "budget"):
            if not isinstance(data.get(name) or {}, dict):
                raise ValueError(f"{name} must hold settings by name (key: value)")
        data = {str(key): value for key, value in data.items() if value is not None}
        config = change(StudyConfig(), data)
        _check(config)
        return _study(config, file)
    except ValueError as error:
        raise ValueError(" ".join(f"{file}: {error}".split())) from None


def _check(config: StudyConfig) -> None:
    check_bounds(config)
    if sum(x is not None for x in (config.budget.steps, config.budget.tokens, config.budget.minutes)) != 1:
        raise ValueError("budget must have one of steps, tokens and minutes, the same for every run: budget.steps 50")
    if not config.compare:
        raise ValueError("compare must name what is compared: methods, as in [dapo, grpo], or settings by name")
    if config.against is not None and config.against not in config.compare:
        near = nearest(config.against, config.compare)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"against must be one of compare; got {config.against!r}{hint}")


def _study(config: StudyConfig, file: Path) -> Study:
    common = _changed(_base(config, file), _settings("set", config.set), "set")
    arms = []
    for cell in _cells(config.grid):
        for name, given in config.compare.items():
            own = _settings(f"compare.{name}", given or {})
            if name in algorithms() and "algorithm" not in own:
                own = {"algorithm": name, **own}
            elif not own:
                raise ValueError(f"compare.{name} sets nothing, and {_no_method(name)}")
            condition, settings = _joined(cell)
            made = _changed(_changed(common, settings, f"grid.{condition}"), own, f"compare.{name}")
            made = _budgeted(made, config.budget, name)
            differ = {path: x for path, x in flat(made).items() if path in {**settings, **own}}
            arms.append(Arm(str(name), condition, made, differ))
    _check_arms(arms)
    study = Study(file.stem, file, config, tuple(arms), tuple(_candidates(config.tune)))
    for run in (*study.tuning, *study.compared()):
        if run.seed in (0, TUNING_SEED):
            with _naming(run.arm.name):
                refuse_ruin(settled(run.config))
                method_of(settled(run.config))
    return study


def check_runs(study: Study) -> None:
    """What a run would refuse, as far as that is known before one is begun: its model, rewards and problems are looked
    for. A mistake is a ValueError of one line."""
    from ..plan.plan import plan

    first = {run.arm.name: run for run in study.compared() if run.seed == 0}
    for run in (*study.tuning[:1], *first.values()):
        with _naming(f"{study.file}: {run.arm.name}"):
            plan(run.config)
    chosen = study.config.test_set
    if chosen is not None and chosen not in (sets := task_of(settled(study.arms[0].config)).tests):
        raise ValueError(f"{study.file}: test_set must be one of {', '.join(sets)}; got {chosen!r}")


def _base(config: StudyConfig, file: Path) -> Config:
    if config.base is None:
        return Config()
    beside = file.parent / config.base
    return build(Config, file=beside if beside.exists() else Path(config.base))


def _settings(where: str, given: Any) -> dict[str, Any]:
    """By path, whether they are nested or dotted; a setting that the study decides is refused."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must hold settings by name, as in {{optim.lr: 1e-6}}; got {str(given)[:60]!r}")
    nested = {str(key): value for key, value in given.items()}
    with _naming(where):
        changed = change(Config(), nested)
    for path, _ in secrets_in(options_of(changed)):
        raise ValueError(f"{where}: {path} is a secret, and no place for one: take it out, and {instead(path)}")
    paths = [path for path in flat(changed) if _given(path, nested)]
    for path in (*paths, *nested):
        if path in OURS:
            elsewhere = f"budget.{path}" if path in BUDGETS else "seeds" if path == "seed" else "the study itself"
            raise ValueError(f"{where} must not set {path}: {elsewhere} says it")
    return {path: flat(changed)[path] for path in paths}


def _given(path: str, nested: Mapping[str, Any]) -> bool:
    """Whether this setting is among them, nested in a section or not."""
    if path in nested:
        return True
    parts = path.split(".")
    for i in range(1, len(parts)):
        inside = nested.get(".".join(parts[:i]))
        if isinstance(inside, Mapping) and _given(".".join(parts[i:]), inside):
            return True
    return False


def _changed(config: Config, settings: Mapping[str, Any], where: str) -> Config:
    with _naming(where):
        return change(config, settings)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _no_method(name: str) -> str:
    near = nearest(str(name), algorithms())
    return "no method has this name" + (f"; did you mean {near!r}?" if near else "")


def _cells(grid: Mapping[str, Any]) -> Iterator[list[tuple[str, str, dict[str, Any]]]]:
    """Every combination: (axis, label, settings) of each axis."""
    axes = []
    for axis, values in grid.items():
        if isinstance(values, Mapping):  # labels, and what each sets
            axes.append(
                [(axis, str(label), _settings(f"grid.{axis}.{label}", given)) for label, given in values.items()]
            )
        elif isinstance(values, list) and values:
            axes.append([(axis, _label(x), _settings("grid", {axis: x})) for x in values])
        else:
            raise ValueError(f"grid.{axis} must be a list of values, or settings by label; got {str(values)[:60]!r}")
    yield from map(list, itertools.product(*axes))


def _joined(cell: Sequence[tuple[str, str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    condition = ", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label, _ in cell)
    settings: dict[str, Any] = {}
    for axis, _, given in cell:
        if twice := settings.keys() & given.keys():
            raise ValueError(f"grid.{axis} sets {min(twice)}, which another part of grid sets too")
        settings |= given
    return condition, settings


def _label(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _budgeted(config: Config, budget: BudgetConfig, name: str) -> Config:
    """The same for every run. What falls with the steps cannot know how many minutes will bring."""
    schedule, steps = config.optim.schedule, budget.steps or ENOUGH
    falls = schedule in ("linear", "cosine") or (schedule == "auto" and config.optim.name == "adamw")
    if budget.minutes is not None and falls:
        raise ValueError(
            f"budget.minutes: the learning rate of {name} falls with the steps, and nobody knows how many fit: set "
            "optim.schedule: constant, or take budget.tokens, with which it falls"
        )
    return change(config, {"steps": steps, "minutes": budget.minutes, "tokens": budget.tokens})


def _check_arms(arms: Sequence[Arm]) -> None:
    """Pairs of problems need the same problems; folders need names of their own."""
    for arm in arms:
        if not arm.slug or [other.slug for other in arms].count(arm.slug) > 1:
            raise ValueError(f"two arms would have the folder {arm.slug}: give one another name")
        for path in OF_TASK:
            if (mine := flat(arm.config)[path]) != (first := flat(arms[0].config)[path]):
                raise ValueError(
                    f"{arm.name} has {path} {mine}, {arms[0].name} has {first}: runs are compared on the same problems"
                )


def _candidates(tune: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values to try."""
    if not tune:
        return
    for path, values in tune.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"tune.{path} must be a list of values to try; got {str(values)[:60]!r}")
        for x in values:
            if not _multiple(x):
                _settings("tune", {path: x})
            elif not isinstance(flat(settled(Config())).get(path), int | float):
                raise ValueError(f"tune.{path}: {x} is a multiple, and this setting is no number")
    for values in itertools.product(*tune.values()):
        yield dict(zip(tune, values, strict=True))


def _multiple(value: Any) -> float | None:
    found = MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) if found else None


def _value(value: Any, own: Any) -> Any:
    """Of six digits, as a product of two short numbers should have few."""
    times = _multiple(value)
    return value if times is None else float(f"{times * own:.6g}")
