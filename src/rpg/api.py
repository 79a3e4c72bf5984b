"""``rpg.train``, ``rpg.evaluate``, ``rpg.sample``, ``rpg.merge``, ``rpg.Run``: what the commands do, from Python.

run = rpg.train(steps=20, rollout={"prompts": 16}, output="runs/notebook")
run.metrics[-1]["reward/mean"], run.summary["eval"]
run.evaluate(k=8), run.model, run.report()
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .find_recipe import recipe_file
from .run.auto import settled
from .run.config import Config
from .run.folder import LATEST, SETTINGS, folder_to_resume, is_run, settings_of, settings_to_resume
from .run.settings import build, change, options_of
from .secrets import instead, keep_hidden, secrets_in
from .trust import check_trust, found, of_a_run, paths_of, started_in

if TYPE_CHECKING:
    from .ask.responder import Sampled
    from .distributed.ranks import World
    from .models.merge import Merged
    from .models.policy import Policy
    from .report.runs import RunData
    from .run.view import View
    from .training.evaluate import Evaluation

NAMED = 5  # runs that a message names
FRAME = '<iframe srcdoc="{}" sandbox="allow-scripts" style="width:100%;height:48rem;border:0"></iframe>'


def train(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Run:
    """Train to the end, or until stopped, and give the run.

    ``config`` is a YAML file, a recipe's name (builtin/dapo) or a Config; None has the defaults: the built-in model on
    the built-in task. ``settings`` are the keys of the YAML, which go before it: ``steps=20, rollout={"prompts": 4}``
    or ``**{"rollout.prompts": 4}``.
    With ``resume`` the run in ``output`` goes on from its newest checkpoint, with the settings it has; ``trust``: also
    with code that they name, if somebody else made the run.

    What cannot work is a ValueError of one line. Under torchrun every process calls this; the first one writes, and a
    run that fails on the way ends all of them.
    """
    config = configure(config, settings=settings, resume=resume, trust=trust)
    from .distributed.ranks import joined  # imports torch: a mistake in the settings is told before
    from .training.failures import Failed

    failure: ValueError | None = None
    with joined(config.device) as world:
        try:
            summary = fit(config, resume=resume, world=world)
        except Failed as error:
            if not error.setup:  # other ranks may wait for this one: several end here, with the message
                world.end_all(str(error), 1)
            failure = error
    if failure is not None:
        raise failure
    return Run(summary["folder"])


def fit(config: Config, *, resume: bool, world: World, shown: View | None = None) -> dict[str, Any]:
    """Training, then report.html; gives the summary. A page that cannot be written is a warning: the run is whole."""
    from .run.signals import echoes_ignored
    from .run.view import View
    from .training import loop

    summary = loop.train(config, resume=resume, world=world, shown=shown)
    if config.log.report and world.first:
        try:
            with echoes_ignored() if summary["stopped_by"] else contextlib.nullcontext():
                Run(summary["folder"]).report()
        except (OSError, ValueError) as error:
            View().message(f"no report.html: {' '.join(str(error).split())}", "warning")
    return summary


def configure(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    trust: bool = False,
) -> Config:
    """The settings of a run: from a file, over it ``flags`` as text or ``settings`` as Python values.

    A run that is resumed brings its own file, unless another is named; which run: ``output``, or else the latest. Code
    that the file of somebody else's run names is refused without ``trust``: see trust.py.
    """
    if isinstance(config, Config):
        chosen = _kept(change(config, settings or {}))
    else:
        file = None if config is None else recipe_file(Path(config))
        if resume and file is None:
            folder = folder_to_resume(str({**(flags or {}), **(settings or {})}.get("output", Config.output)))
            file = settings_to_resume(folder)
            settings = {**(settings or {}), "output": str(folder)}
        chosen = _read(file, flags, settings)
        resumed = resume and config is None  # whatever else lies in the folder
        if file is not None and (resumed or of_a_run(file)) and not trust:
            check_trust(chosen, file.parent, {*(flags or {}), *paths_of(settings or {})})
        if resumed and file is not None and found(chosen, file.parent) != chosen:
            home = started_in(file.parent)
            raise ValueError(f"{file.parent} names files that are not here: go on from {home}, where it was started")
    return replace(chosen, output=str(folder_to_resume(chosen.output))) if resume else chosen


def _read(file: Path | None, flags: Mapping[str, Any] | None, settings: Mapping[str, Any] | None) -> Config:
    """Whatever code the file names. A secret is refused in it."""
    if file is not None:
        for path, _ in secrets_in(options_of(build(Config, file=file))):
            raise ValueError(f"{file}: {path} is a secret, and no place for one: take it out, and {instead(path)}")
    return _kept(change(build(Config, file=file, flags=flags), settings or {}))


def _kept(config: Config) -> Config:
    """Its secrets are hidden from here on."""
    keep_hidden(options_of(config))
    return config


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model: str | os.PathLike[str] | Run, task: str | None = None, **options: Any) -> list[Evaluation]:
    """mean@k and pass@k on held-out problems, with 95 % intervals; one Evaluation for each set of problems.

    ``model`` is ``builtin``, a Hugging Face folder, a hub id, or a run. ``options`` are those of evaluation_config, k,
    problems, temperature, checkpoint and so on, and any setting of rpg.train.
    """
    from .training.evaluate import evaluate_model

    return evaluate_model(evaluation_config(model, task, **options))


def evaluation_config(
    model: str | os.PathLike[str] | Run,
    task: str | None = None,
    *,
    k: int | None = None,
    problems: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    reward: str | None = None,
    checkpoint: str | int = "best",
    trust: bool = False,
    flags: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = warnings.warn,
    **settings: Any,
) -> Config:
    """The settings of an evaluation; what is None is the run's own, or else the default (k 32, problems 256)."""
    config, run = _open(model, checkpoint, flags, settings, warn)
    if task is not None:
        config = replace(config, task=replace(config.task, name=task, test=task, reward=None, rewards={}))
    named = {*settings, *(flags or {}), *(f"eval.{key}" for key in settings.get("eval", {}))}
    k = 32 if k is None and "eval.k" not in named else k
    problems = 256 if problems is None and "eval.problems" not in named else problems
    asked = {"task.reward": reward, "eval.temperature": temperature, "eval.top_p": top_p}
    asked |= {"rollout.max_new_tokens": max_new_tokens, "eval.k": k, "eval.problems": problems}
    asked = {path: value for path, value in asked.items() if value is not None}
    config = change(config, asked)
    _check_run(config, run, model, trust, {*paths_of(settings), *(flags or {}), *asked, *_of_task(task)})
    return config


def _of_task(task: str | None) -> tuple[str, ...]:
    return () if task is None else ("task.name", "task.test")


def _check_run(
    config: Config, run: Path | None, model: str | os.PathLike[str] | Run, trust: bool, given: set[str]
) -> None:
    if run is not None and not trust and not (isinstance(model, Run) and model.trust):
        check_trust(config, run, given)


def _open(
    model: str | os.PathLike[str] | Run,
    checkpoint: str | int,
    flags: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    warn: Callable[[str], None],
) -> tuple[Config, Path | None]:
    """The settings of a run, or the defaults, with the model that is meant; and the run's folder."""
    name = str(model.folder) if isinstance(model, Run) else os.fspath(model)
    run = Path(name)
    try:
        there = run.exists()
    except PermissionError as error:
        raise ValueError(f"{run} cannot be read: {error.strerror}") from error
    if not there and "/" in name and (others := _runs_in(run.parent)):
        raise ValueError(f"there is no run {run}; {run.parent} has {others}")
    file = settings_of(run)
    config = _read(file, flags, settings)
    if file is not None:
        name = str(checkpoint_folder(run, checkpoint, warn) / "model")
        config = found(config, run, {*(flags or {}), *paths_of(settings)})
    elif any((run / "model" / file).is_file() for file in ("config.json", "adapter_config.json")):
        name = str(run / "model")
    return change(config, {"model": name}), None if file is None else run


def _runs_in(folder: Path) -> str:
    """A few by name."""
    names = sorted(path.name for path in folder.glob("*") if is_run(path) and not path.is_symlink())
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def checkpoint_folder(run: Path, which: str | int = "best", warn: Callable[[str], None] = warnings.warn) -> Path:
    """A run's checkpoint: best, last, or that of a step. One that is damaged is refused."""
    from .run import checkpoint
    from .training.progress import best_of

    saved = checkpoint.folders(run / "checkpoints")
    if not saved:
        raise ValueError(checkpoint.lacking(run))
    if which in ("best", "last"):
        newest = checkpoint.load(run / "checkpoints", warn)
        if newest is None:
            raise ValueError(f"{run} has no checkpoint that is whole")
        if which == "last":
            return newest.folder
        evals = [e for e in newest.state["evals"] if e["step"] in saved]
        step = best_of(evals)["step"] if evals else newest.step
    elif str(which).isdigit() and int(which) in saved:
        step = int(which)
    else:
        raise ValueError(f"{run} has no checkpoint {which!r}; it has best, last, {', '.join(map(str, sorted(saved)))}")
    if problem := checkpoint.verify(saved[step]):
        raise ValueError(f"{saved[step]}: {problem}")
    return saved[step]


# ---- sampling --------------------------------------------------------------------------------------------------------


def sample(
    model: str | os.PathLike[str] | Run,
    prompt: str | None = None,
    *,
    n: int = 4,
    seed: int = 0,
    answer: str | None = None,
    raw: bool = False,
    **options: Any,
) -> list[Sampled]:
    """Responses of a model or a run to a prompt, put as the run's task puts its problems.

    None is one of the task's held-out problems; ``answer`` says what is right, where the task does not know it. With
    ``raw`` the prompt goes in no template. ``options`` are those of sampling_config.
    """
    from .ask.question import question
    from .ask.responder import Responder

    warn = options.get("warn", warnings.warn)
    config, temperature, task = sampling_config(model, **options)
    asked = question(config, None if raw else task, prompt, answer, seed, warn)
    return Responder(config, temperature=temperature).ask(asked, n, seed, raw=raw)


def sampling_config(
    model: str | os.PathLike[str] | Run,
    *,
    task: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    checkpoint: str | int = "best",
    trust: bool = False,
    flags: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = warnings.warn,
    **settings: Any,
) -> tuple[Config, float, str | None]:
    """(settings, temperature, the task whose problems the prompt is put like); what is None is the run's own."""
    config, run = _open(model, checkpoint, flags, settings, warn)
    task_given = task
    builtin = config.model == "builtin"
    if task is not None:
        config = replace(config, task=replace(config.task, name=task, test=None, reward=None, rewards={}))
    elif run is not None:
        task = config.task.name
    elif builtin:
        task = "mixed"
    asked = {"rollout.top_p": top_p, "rollout.max_new_tokens": max_new_tokens}
    config = change(config, {path: value for path, value in asked.items() if value is not None})
    _check_run(config, run, model, trust, {*paths_of(settings), *(flags or {}), *_of_task(task_given)})
    config = settled(config)
    return config, config.rollout.temperature if temperature is None else temperature, task


# ---- merging ---------------------------------------------------------------------------------------------------------


def merge(
    runs: Sequence[str | os.PathLike[str] | Run],
    output: str | os.PathLike[str],
    *,
    init: str | None = None,
    method: str = "slerp",
    towards: float = 1.0,
    weights: Sequence[float] | None = None,
    per: str = "layer",
    checkpoint: str | int = "last",
    trust: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Merged:
    """Runs, or models, as one model in the folder ``output``: init + towards·slerp of what each has learnt.

    ``init`` is the model that they began from; None: what the runs' settings say. ``trust``: also with
    code of their own, if others made the runs. ``note`` is told what is being done. See docs/merge.md.
    """
    import tempfile

    from .models.loading import is_missing
    from .models.merge import RECORD, check_shares, open_source
    from .models.merge import merge as merge_models
    from .publish.card import CARD, base_of, merged_card

    names = [str(run.folder) if isinstance(run, Run) else os.fspath(run) for run in runs]
    weights = [1.0] * len(names) if weights is None else list(weights)
    check_shares(weights, len(names), towards)
    if missing := next((name for name in (*names, init or "") if is_missing(name)), None):
        raise ValueError(f"{missing} does not exist: give a run's folder, a model folder or a hub id")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: give another folder with -o")
    for name in names if not trust else ():
        if (file := settings_of(Path(name))) is not None:
            check_trust(build(Config, file=file), Path(name), (), ["model_options."])
    begun = _beginning(names) if init is None else (init, {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        scratch, whole = Path(beside) / "scratch", Path(beside) / "whole"
        scratch.mkdir()
        whole.mkdir()
        sources = []
        for name in names:
            note(f"opening {name}")
            path, options = _model_of(name, checkpoint)
            sources.append(replace(open_source(path, scratch, options), name=name))
        bits = {source.base_bits for source in sources}
        if len(bits) > 1:
            raise ValueError("some were trained beside weights in 4 bits and some were not: merge each kind on its own")
        start = open_source(begun[0], scratch, begun[1], *bits)
        merged = merge_models(
            sources, start, whole, weights=weights, method=method, towards=towards, per=per, note=note
        )
        record = {"models": names, "init": begun[0], "weights": weights, "method": method, "towards": towards}
        record |= {"per": per, "norms": merged.norms, "cosines": merged.cosines, "norm": merged.norm}
        (whole / CARD).write_text(merged_card(record, base_of(*begun)), encoding="utf-8")
        (whole / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        whole.rename(folder)
    return merged


def _model_of(name: str, checkpoint: str | int) -> tuple[str, dict[str, Any]]:
    """The model that a run's folder, a checkpoint's, or a model's name means, and the options it is loaded with."""
    path = Path(name)
    if (file := settings_of(path)) is not None:
        options = build(Config, file=file).model_options
        return str(checkpoint_folder(path, checkpoint, _refuse) / "model"), dict(options)
    if any((path / "model" / file).is_file() for file in ("config.json", "adapter_config.json")):
        return str(path / "model"), {}
    return name, {}


def _refuse(damage: str) -> None:
    """An earlier checkpoint is not what was asked for."""
    raise ValueError(f"{damage}; to merge another checkpoint, give its step with --checkpoint")


def _beginning(names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The model that all of these runs began from."""
    begun: dict[str, dict[str, Any]] = {}
    for name in names:
        if (file := settings_of(Path(name))) is None:
            raise ValueError(f"{name} is no run, so what it began from is not known: give --init MODEL")
        config = build(Config, file=file)
        begun[config.model] = dict(config.model_options)
    if len(begun) > 1:
        raise ValueError(f"the runs began from different models, {' and '.join(begun)}: give --init MODEL")
    return next(iter(begun.items()))


# ---- runs ------------------------------------------------------------------------------------------------------------


class Run:
    """A run's folder, finished or still running. What its files say is read when it is asked for.

    ``trust``: code that its settings name may run, though somebody else made it.
    """

    def __init__(self, folder: str | os.PathLike[str] = LATEST, *, trust: bool = False):
        self.folder, self.trust = Path(folder), trust
        if not is_run(self.folder):
            self._data()  # says what is wrong

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _data(self) -> RunData:
        from .report import read_run

        return read_run(self.folder)

    @property
    def config(self) -> Config:
        return build(Config, file=self.folder / SETTINGS)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a step; pandas.DataFrame(run.metrics) is a table of them."""
        from .report.runs import all_rows

        return all_rows(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        return self._data().summary

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Responses that were logged, with their prompts, rewards and advantages."""
        from .run.folder import read_rows

        return list(read_rows(self.folder / "samples.jsonl", []))

    def checkpoint(self, which: str | int = "best") -> Path:
        """Folder of a checkpoint: best, last, or that of a step. Its ``model`` is a Hugging Face model."""
        return checkpoint_folder(self.folder, which)

    @cached_property
    def _policy(self) -> Policy:
        from .models.policy import Policy
        from .training.setup import pick_device, pick_dtype

        config, folder = self.config, str(self.checkpoint() / "model")
        if not self.trust:
            check_trust(config, self.folder, (), ["model_options."])
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        return Policy.load(folder, device=device, dtype=dtype, options=config.model_options)

    @property
    def model(self) -> Any:
        """The trained model, a transformers one: that of the best checkpoint, on the run's device."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        return self._policy.tokenizer

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page, to report.html in the folder unless told otherwise, and give its path."""
        from .report import write

        page = self.folder / "report.html" if path is None else Path(path)
        write([self._data()], page)
        return page

    def _repr_html_(self) -> str:
        """A notebook shows the page."""
        from .report import page

        return FRAME.format(escape(page([self._data()])))

    def evaluate(self, task: str | None = None, **options: Any) -> list[Evaluation]:
        """See ``rpg.evaluate``."""
        return evaluate(self, task, **options)

    def sample(self, prompt: str | None = None, **options: Any) -> list[Sampled]:
        """See ``rpg.sample``."""
        return sample(self, prompt, **options)
