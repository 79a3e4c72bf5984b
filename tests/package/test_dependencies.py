"""What src/rpg imports against what pyproject.toml declares: each import in the core, or in the extra it belongs to."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from rpg.console import TRAIN

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = ("loss", "audit", "console", "__init__", "__main__", "cli", "clip", "gates", "mismatch", "secrets")
BY_PLACE = {  # these import their engine, and what comes with it
    "integrations/trl/": "trl",
    "integrations/verl/": "verl",
    "integrations/versions.py": "trl",
    "audit/peers/verl_worker.py": "verl",
    "audit/peers/": "audit",
    "rollout/vllm.py": "vllm",
    "models/adapters.py": "peft",
    "models/gguf.py": "gguf",
    "tasks/sources/gym.py": "gym",
    "bench/": "audit",  # beside TRL and Liger
}
WITH_TORCH = {"triton"}  # torch brings it, where there are GPUs
NAMES = {"yaml": "pyyaml"}  # imports whose distribution has another name; - and _ are the same


def declared(extra: str | None) -> set[str]:
    """The distributions of the core, or of the core and an extra."""
    found, queue = set(), [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    for requirement in queue:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name == PROJECT["name"]:
            queue += [each for key in inner.split(",") for each in PROJECT["optional-dependencies"][key]]
        else:
            found.add(name.lower())
    return found


def imported() -> dict[str, set[str]]:
    """By file, the distributions that it imports, lazily or not."""
    found = defaultdict(set)
    source = ROOT / "src" / "rpg"
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for top in {name.partition(".")[0] for name in names} - {"rpg", *sys.stdlib_module_names} - WITH_TORCH:
                found[path.relative_to(source).as_posix()].add(NAMES.get(top, top.replace("_", "-").lower()))
    return found


def extra_of(file: str) -> str | None:
    place = next((extra for start, extra in BY_PLACE.items() if file.startswith(start)), None)
    return place or (None if file.partition("/")[0].removesuffix(".py") in CORE else "train")


def test_every_import_is_declared_where_it_belongs():
    wrong = {file: names - declared(extra_of(file)) for file, names in imported().items()}
    assert not {file: names for file, names in wrong.items() if names}


def test_nothing_is_declared_that_nobody_imports():
    used = set().union(*imported().values()) | {"tensorboard"}  # torch.utils.tensorboard imports it
    used |= {"wandb", "trackio"}  # imported by the name of the setting
    extras = [extra for extra in PROJECT["optional-dependencies"] if extra != "dev"]
    assert set().union(*map(declared, extras)) == used


def test_the_core_is_small_and_every_extra_can_train():
    assert declared(None) == {"torch", "numpy", "rich"}
    for extra in PROJECT["optional-dependencies"]:
        assert declared(extra) >= declared("train"), extra
    assert {NAMES.get(name, name.replace("_", "-")) for name in TRAIN} == declared("train") - declared(None)


def test_what_the_tests_run_with_satisfies_what_is_declared():
    from packaging.requirements import Requirement

    for extra in [None, "train", "trl", "audit", "peft", "gguf", "gym"]:
        for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
            requirement = Requirement(text)
            if requirement.name != PROJECT["name"]:
                assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), text
