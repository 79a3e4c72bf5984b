"""``rpg export verl`` and ``rpg export trl``."""

from __future__ import annotations

import argparse
import functools
import itertools
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..api import configure
from ..console import Mistake, own_command
from ..run.config import Config
from ..run.folder import settings_of
from ..run.settings import add_flags, given, to_yaml
from ..trust import HELP as TRUST

HELP = """\
Write a recipe as a run of verl or TRL, for many GPUs: the same problems, templates, rewards, algorithm and settings,
from the recipe's model or from a checkpoint of rpg train. What the engine cannot express is refused by name."""

EXAMPLES = """\
examples:
  rpg export verl gsm8k/qwen2.5-coder-0.5b/rpg-urkl -o verl-run --gpus 8
  rpg export verl runs/mine/config.yaml --from runs/mine --steps 400    go on where rpg train stopped
  rpg export verl builtin/dr-grpo --async --gpus 4 --rollout-gpus 4    sampling and training at once
  rpg export trl builtin/rpg-urkl -o trl-run      also runs on a CPU"""
VERL_FILES = """\
train.parquet, one parquet file for each test set, reward.py (rpg's own rewards) and run.sh, the whole command of
`python -m verl.trainer.main_ppo` with every setting. With --async it is that of verl's fully asynchronous trainer. rpg
has to be installed beside verl, on every node."""
TRL_FILES = """\
train.py, a script with every setting that trains with rpg.integrations.trl.RPGTrainer, and recipe.yaml, the settings
that it reads the task from."""

GPUS = 8  # of a node
STALENESS = "with --async: how far sampling may be ahead, in steps' prompts (default 0.5; 0: not at all)"


def add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a recipe as a run of verl or TRL, on many GPUs",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engines = parser.add_subparsers(dest="engine", required=True, metavar="verl|trl")
    for name, write, files in (("verl", _write_verl, VERL_FILES), ("trl", _write_trl, TRL_FILES)):
        engine = engines.add_parser(
            name,
            help=f"as a run of {name}",
            usage=f"rpg export {name} RECIPE [-o FOLDER] [--from RUN [--checkpoint last|best|N]] [--gpus N] "
            "[--nodes N] [--section.key VALUE …]",
            description=f"{HELP}\n\nWrites {files}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = engine.add_argument
        add(
            "recipe",
            type=Path,
            metavar="RECIPE",
            help="settings in YAML, as for rpg train --config: a file, or a recipe's name",
        )
        free = f"export/RECIPE-{name}, or the first of -2, -3, … that is free"
        add("-o", "--folder", type=Path, metavar="FOLDER", help=f"where to (default: {free})")
        add("--from", dest="begin", type=Path, metavar="RUN", help="start from a checkpoint of this run of rpg train")
        add("--checkpoint", default="last", metavar="last|best|N", help="which of its checkpoints (default: last)")
        usual = f"default {GPUS}, with --async {GPUS // 2}" if name == "verl" else "default 1"
        add("--gpus", type=_count, metavar="N", help=f"GPUs on each node ({usual})")
        add("--nodes", type=_count, default=1, metavar="N", help="nodes (default 1)")
        if name == "verl":
            add("--async", dest="apart", action="store_true", help="sample on other GPUs, while --gpus × --nodes train")
            add("--rollout-gpus", type=_count, metavar="N", help="with --async: GPUs that sample (default: as --gpus)")
            add("--rollout-nodes", type=_count, metavar="N", help="with --async: their nodes (default: as --nodes)")
            add("--staleness", type=float, metavar="SHARE", help=STALENESS)
            add("--settings-only", action="store_true", help="run.sh alone, to read: no problems are loaded")
        else:
            add("--async", dest="apart", action="store_true", help=argparse.SUPPRESS)  # to say where it is
        add("--trust", action="store_true", help=TRUST)
        add_flags(engine, Config)
        engine.set_defaults(run=functools.partial(_export, write=write))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text}")
    return int(text)


def _export(args: argparse.Namespace, write: Any) -> int:
    from ..run.auto import refuse_ruin, settled
    from ..run.checkpoint import CheckpointError

    if args.apart and args.engine == "trl":
        raise Mistake("--async is for verl; TRL's asynchronous trainer takes a script: docs/trl.md#asynchronous")
    if args.recipe.is_dir():
        raise Mistake(_no_recipe(args.recipe, args.engine))
    folder = args.folder or _free(Path("export") / f"{args.recipe.stem}-{args.engine}")
    try:
        if _taken(folder):
            raise ValueError(f"{folder} exists already: give another folder with -o")
        config = settled(configure(args.recipe, flags=given(args, Config), trust=args.trust))
        refuse_ruin(config)
        for line in write(args, config, folder):
            print(line)
    except (ValueError, OSError, CheckpointError) as error:
        raise Mistake(" ".join(str(error).split())) from error
    return 0


def _no_recipe(folder: Path, engine: str) -> str:
    if (file := settings_of(folder)) is None:
        return f"{folder} is a folder: give a recipe, a YAML file of settings"
    command = f"{own_command()} export {engine} {shlex.quote(str(file))}"
    return f"{folder} is a run's folder, not a recipe: give the settings in it, {command}"


def _taken(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _free(folder: Path) -> Path:
    """Itself, or the next that is free: dapo-verl, dapo-verl-2, dapo-verl-3"""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([folder], numbered) if not _taken(one))


def _title(args: argparse.Namespace, config: Config) -> str:
    return f"{config.algorithm} on {config.task.name}, from {args.recipe}"


def _start(args: argparse.Namespace, config: Config) -> Any:
    from ..export.start import fresh, from_run

    if args.begin is None:
        return fresh(config)
    start = from_run(args.begin, args.checkpoint)
    start.steps_left(config)
    return start


def _shipped_model(start: Any, there: str) -> tuple[Any, bool]:
    """The built-in model travels with the files: it lies inside the installed package."""
    from ..models import BUILTIN

    if start.model != str(BUILTIN):
        return start, False
    return replace(start, model=f"{there}/model"), True


def _copy_model(folder: Path) -> None:
    from ..models import BUILTIN

    shutil.copytree(BUILTIN, folder / "model", ignore=shutil.ignore_patterns("__pycache__", "*.py"))


# ---- verl ------------------------------------------------------------------------------------------------------------


def _write_verl(args: argparse.Namespace, config: Config, folder: Path) -> list[str]:
    from ..export import data, verl
    from ..export.overrides import FOLDER
    from ..export.reward import reward_file
    from ..tasks import load_task
    from ..training.setup import held_out, method_of

    start = _start(args, config)
    at_home, (start, shipped) = start.model, _shipped_model(start, FOLDER)
    chat, alone = config.task.chat is not False, args.settings_only
    sampling = _sampling(args)
    gpus = args.gpus or (GPUS if sampling is None else GPUS // 2)
    where = verl.VerlLaunch(start, gpus, args.nodes, sampling=sampling, chat=chat, settings_only=alone)
    verl.export(config, where)  # what cannot be is refused before anything is loaded
    task_of = config.task
    written: dict[str, list[dict[str, Any]]] = {}
    rewards = ""
    copies: list[Path] = []
    if not alone:
        tokenizer, context = data.load_tokenizer(at_home, config)
        task = load_task(task_of.name, config.seed, task_of.test, task_of.prompt_key, task_of.answer_key, look=False)
        dynamic = method_of(config).dynamic
        problems, in_order = data.train_problems(task, config, start.problem, start.steps_left(config), dynamic)
        sets = held_out(task, config)
        chat = data.uses_chat(tokenizer, config)
        data.check_prompts(tokenizer, chat, [problems, *sets.values()], config)
        names = {name: data.file_name(name, i) for i, name in enumerate(sets)}
        where = replace(where, context=context, chat=chat, in_order=in_order, tests=tuple(names.values()))
        written["train.parquet"] = data.rows(problems, task.name, "train", config)
        written |= {file: data.rows(sets[name], name, "test", config) for name, file in names.items()}
        rewards, copies = reward_file(config, task, _title(args, config))
    script = verl.run_sh(config, where, _title(args, config))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in written.items():
        data.write(folder / name, rows)
    for copy in copies:
        shutil.copy(copy, folder / copy.name)
    if rewards:
        (folder / "reward.py").write_text(rewards, encoding="utf-8")
    if shipped and not alone:
        _copy_model(folder)
    (folder / "run.sh").write_text(script, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    if alone:
        return [f"wrote run.sh to {folder}: the settings alone, to read; to train, export without --settings-only"]
    sizes = [f"{name} ({len(rows):,} problems)" for name, rows in written.items()]
    more = [*sizes, "reward.py", *(copy.name for copy in copies), *["model"][:shipped]]
    return _said(folder, [*more, "run.sh"], start, f"bash {shlex.quote(str(folder / 'run.sh'))}")


def _sampling(args: argparse.Namespace) -> Any:
    """The GPUs that sample, with --async."""
    from ..export.verl_async import Samplers

    given = {"gpus": args.rollout_gpus, "nodes": args.rollout_nodes, "staleness": args.staleness}
    given = {name: value for name, value in given.items() if value is not None}
    if args.apart:
        return Samplers(**({"gpus": args.gpus or GPUS // 2, "nodes": args.nodes} | given))
    for name in given:
        flag = "--staleness" if name == "staleness" else f"--rollout-{name}"
        raise ValueError(f"{flag} is for the asynchronous trainer: give --async too")
    return None


# ---- TRL -------------------------------------------------------------------------------------------------------------


def _write_trl(args: argparse.Namespace, config: Config, folder: Path) -> list[str]:
    from ..export import trl
    from ..export.start import Launch

    start, shipped = _shipped_model(_start(args, config), "$HERE")
    where = Launch(start, args.gpus or 1, args.nodes)
    script = trl.script(config, where, _title(args, config))
    folder.mkdir(parents=True, exist_ok=True)
    if shipped:
        _copy_model(folder)
    (folder / "recipe.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "train.py").write_text(script, encoding="utf-8")
    line = f"{trl.command(where)} {shlex.quote(str(folder / 'train.py'))}"
    return _said(folder, ["recipe.yaml", *["model"][:shipped], "train.py"], start, line)


def _said(folder: Path, names: list[str], start: Any, line: str) -> list[str]:
    began = [f"from the {start.where}: {start.adapter or start.model}"] if start.where else []
    return [f"wrote {', '.join(names)} to {folder}", *began, f"run it with: {line}"]
