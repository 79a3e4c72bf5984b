"""The order of the rooms of src/rpg, read from the syntax trees: nothing is imported to check what imports what."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "rpg"

# From the ground up: a module imports from its own room and from those above it in this list, never from one below.
ROOMS = {
    "console": "mistakes in one line, printing, and the one formatter of every quantity",
    "secrets": "which settings hold a secret, and text without it",
    "yaml_text": "YAML, read with care and written back exactly",
    "loss": "the loss and everything in it: torch tensors in, a loss out",
    "recorded": "one optimiser step's batch as a file, which any trainer can write",
    "audit": "is this loss's gradient the one that was meant? every response enumerated",
    "kernels": "fused log-probabilities, attention and sampling: in torch, and for GPUs",
    "models": "a Hugging Face causal LM: loading, adapters, GGUF files, log-probabilities",
    "rewards": "how a response is scored: functions of the user, their processes and limits",
    "verify": "is this answer right?",
    "tasks": "what is asked: problems by name, from files or the hub, templates, mixtures",
    "rollout": "prompts in, sampled responses with their log-probabilities out",
    "run": "what a run is and what it writes: settings, folder, logs, checkpoints, terminal",
    "trust": "whose code a run's folder may run",
    "distributed": "several processes, one run: ranks, shards of the weights, work split among them",
    "costs": "memory, operations and seconds, counted instead of measured",
    "publish": "a model as others get it: its card, and its way to the hub",
    "training": "the training step, in the order of its data, and the loop around it",
    "ask": "a model answers a prompt of yours: put as its task puts it, judged where that can be done",
    "plan": "the dry run: what a run would need and take, before anything is loaded",
    "integrations": "the same method inside other people's trainers: TRL and verl",
    "export": "a recipe as a run of TRL or verl",
    "report": "runs in, one page out",
    "study": "settings × seeds as runs, compared with intervals",
    "replay": "one recorded batch, every method: which gradient would each take, and how noisy is it?",
    "explorer": "the losses as a page to look at, drawn by their own source",
    "bench": "speed beside peers and counted floors",
    "find_recipe": "the recipes that come with the package, by name",
    "api": "a training in a few lines of Python",
    "clip": "`rpg.loss.clip` by its public name",
    "gates": "`rpg.loss.gates` by its public name",
    "mismatch": "`rpg.loss.mismatch` by its public name",
    "rpg": "the public names, each loaded when first asked for",
    "commands": "the commands of `rpg`, a file each",
    "cli": "the command `rpg`: which command a line is for",
    "__main__": "the same as `python -m rpg`",
}
MOST_FILES = 16  # in one folder
WITHOUT_TORCH = ("rewards", "verify", "tasks")  # loaded by every process that runs a reward function


@dataclass
class Module:
    """A file, and what it imports: modules of ours (name -> whether merely loading the file imports it), and others."""

    name: str
    path: Path
    tree: ast.Module
    ours: dict[str, bool] = field(default_factory=dict)
    others: dict[str, bool] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name


def read(src: Path) -> dict[str, Module]:
    """The modules of a package, by name; every kind of import is followed, wherever in the file it stands."""
    modules = {}
    for path in sorted(src.rglob("*.py")):
        name = ".".join(path.relative_to(src.parent).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    for module in modules.values():
        _add_imports(module, modules, src.name)
    return modules


def _add_imports(module: Module, modules: dict[str, Module], root: str) -> None:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]

    def add(name: str, at_load: bool) -> None:
        if name.partition(".")[0] != root:
            top = name.partition(".")[0]
            module.others[top] = module.others.get(top, False) or at_load
            return
        while name not in modules:  # a name in a module
            name = name.rpartition(".")[0]
        # the packages around it are loaded first; those around this module are there already
        for target in (name, *(around for around in _packages(name) if around not in _packages(module.name))):
            if target != module.name:
                module.ours[target] = module.ours.get(target, False) or at_load

    for node, at_load in _statements(module.tree):
        if isinstance(node, ast.ClassDef):
            module.classes.append(node.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, at_load)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                if base != root or f"{root}.{alias.name}" in modules:
                    add(f"{base}.{alias.name}", at_load)
                elif alias.name not in _constants(modules[root]):  # __version__ is there before anything is loaded
                    add(f"{root}.{_homes(modules[root]).get(alias.name, '')}".rstrip("."), at_load)
        elif (name := _imported_by_call(node)) is not None:
            add(f"{package}{name}" if name.startswith(".") else name, at_load)
    if module.name == root:
        for home in _homes(module).values():
            add(f"{root}.{home}", False)


def _statements(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """The imports, import calls and classes of a file, and whether they run when it is loaded: what is in functions or
    for the type checker alone does not."""
    queue: list[tuple[ast.AST, bool]] = [(tree, True)]
    for node, at_load in queue:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.Call):
            yield node, at_load
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        later = types_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        queue += [(child, at_load and not later) for child in ast.iter_child_nodes(node)]


def _imported_by_call(node: ast.AST) -> str | None:
    """import_module("rpg.loss.clip") -> rpg.loss.clip."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in ("import_module", "__import__"):
            return str(node.args[0].value)
    return None


def _packages(name: str) -> list[str]:
    """rpg.tasks.sources.hub -> rpg.tasks.sources, rpg.tasks."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 1, -1)]


def _constants(root: Module) -> set[str]:
    targets = [t for node in root.tree.body if isinstance(node, ast.Assign) for t in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _homes(root: Module) -> dict[str, str]:
    """The table of public names: a dictionary from names to the modules that they are loaded from."""
    for node in root.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            table = ast.literal_eval(node.value)
            return {name: home.lstrip(".") for name, home in table.items()}
    return {}


def strangers(modules: dict[str, Module], rooms: Sequence[str] = tuple(ROOMS)) -> list[str]:
    """Rooms that are not in the list, and names in the list that are no room."""
    here = {module.room for module in modules.values()}
    return [f"{room} has no place in the order" for room in sorted(here - set(rooms))] + [
        f"{room} is in the order and not in the source" for room in rooms if room not in here
    ]


def upward(modules: dict[str, Module], rooms: Sequence[str] = tuple(ROOMS)) -> list[str]:
    """Imports of a room by one that comes before it."""
    place = {room: n for n, room in enumerate(rooms)}
    return [
        f"{module.name} imports {target}"
        for module in modules.values()
        for target in module.ours
        if place.get(modules[target].room, 0) > place.get(module.room, 0)
    ]


def cycles(modules: dict[str, Module]) -> list[str]:
    """One shortest way round for every module that can be reached from itself, each way named once."""
    ways: dict[frozenset[str], list[str]] = {}
    for start in modules:
        before: dict[str, str] = {}
        queue = [start]
        for name in queue:
            for target in modules[name].ours:
                if target not in before:
                    before[target] = name
                    queue.append(target)
        if start in before:
            way = [start, before[start]]
            while way[-1] != start:
                way.append(before[way[-1]])
            ways.setdefault(frozenset(way), way[::-1])
    return [" -> ".join(way) for way in ways.values()]


def crowded(modules: dict[str, Module], most: int = MOST_FILES) -> list[str]:
    """Folders with more files at their own level than a reader takes in at once."""
    folders = sorted({module.path.parent for module in modules.values()})
    files = {folder: sum(path.is_file() for path in folder.iterdir()) for folder in folders}
    return [f"{folder.name} has {n} files" for folder, n in files.items() if n > most]


def foreign(modules: dict[str, Module]) -> list[str]:
    """What console and loss/ import beyond what lets them be used alone."""
    wrong = []
    for module in modules.values():
        ours = {"console": (), "loss": ("loss", "console")}.get(module.room)
        others = {"console": None, "loss": {"torch", *sys.stdlib_module_names}}.get(module.room)
        wrong += [f"{module.name} imports {t}" for t in module.ours if ours is not None and modules[t].room not in ours]
        wrong += [
            f"{module.name} imports {name}" for name in module.others if others is not None and name not in others
        ]
    return wrong


def torch_loaded(modules: dict[str, Module]) -> list[str]:
    """Modules that a process with a reward function loads, and that import torch or something that does."""

    def loads(name: str) -> list[str]:
        queue = [name, *_packages(name)]
        for each in queue:
            queue += [target for target, at_load in modules[each].ours.items() if at_load and target not in queue]
        return sorted(queue)

    wrong = []
    for module in modules.values():
        if module.room in WITHOUT_TORCH:
            wrong += [f"{module.name} imports torch"] if "torch" in module.others else []
            through = [n for n in loads(module.name) if modules[n].others.get("torch") and n != module.name]
            wrong += [f"{module.name} loads {name}, which imports torch" for name in through]
    return wrong


def defined_twice(modules: dict[str, Module]) -> list[str]:
    """Class names that mean two things. Private ones are their file's own business."""
    where = defaultdict(list)
    for module in modules.values():
        for name in module.classes:
            if not name.startswith("_"):
                where[name].append(module.name)
    return [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]


RULES = [strangers, upward, cycles, crowded, foreign, torch_loaded, defined_twice]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read(SRC)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule, modules):
    wrong = rule(modules)
    assert not wrong, "\n".join(["", *wrong])


# the checks, on small packages that break one rule each

FRONT = '_HOME = {"PolicyLoss": "loss.policy"}\n__version__ = "1"\n'
SOUND = {
    "__init__.py": FRONT,
    "console.py": "import sys\n",
    "loss/__init__.py": "",
    "loss/policy.py": "import math\nimport torch\nfrom ..console import plural\nclass PolicyLoss: ...\n",
    "tasks/__init__.py": "from .task import Task\n",
    "tasks/task.py": "from .. import __version__\nclass Task: ...\nclass _Row: ...\n",
    "training/__init__.py": "",
    "training/loop.py": "from ..loss.policy import PolicyLoss\nfrom ..tasks import Task\nclass _Row: ...\n",
    "cli.py": "def main():\n    from .training.loop import train\n    from . import PolicyLoss, __version__\n",
}
ORDER = ["console", "loss", "tasks", "training", "rpg", "cli"]


def package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "rpg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "rpg"


def complaints(src: Path) -> dict[str, list[str]]:
    modules = read(src)
    every = {
        "strangers": strangers(modules, ORDER),
        "upward": upward(modules, ORDER),
        "cycles": cycles(modules),
        "crowded": crowded(modules, most=4),
        "foreign": foreign(modules),
        "torch": torch_loaded(modules),
        "twice": defined_twice(modules),
    }
    return {name: wrong for name, wrong in every.items() if wrong}


def test_a_sound_package_passes(tmp_path):
    assert complaints(package(tmp_path, SOUND)) == {}
    modules = read(tmp_path / "rpg")
    assert modules["rpg.cli"].ours == {"rpg.training.loop": False, "rpg.training": False} | {
        "rpg.loss.policy": False,  # a public name is an import of the module that it comes from
        "rpg.loss": False,
    }
    assert modules["rpg"].ours == {"rpg.loss.policy": False, "rpg.loss": False}
    assert modules["rpg.tasks.task"].ours == {}


LAZY = "def f():\n    {}\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"


@pytest.mark.parametrize("text", ["{}\n", LAZY, TYPES, "try:\n    {}\nexcept ImportError:\n    pass\n"])
@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("from ..training import loop", "rpg.training.loop"),
        ("from ..training.loop import train", "rpg.training.loop"),
        ("from .. import cli", "rpg.cli"),
        ("from .. import algorithm", "rpg"),
        ("import rpg.training.loop", "rpg.training.loop"),
        ("import rpg", "rpg"),
        ("from rpg.training import loop as x", "rpg.training.loop"),
        ("import importlib; importlib.import_module('rpg.training.loop')", "rpg.training.loop"),
    ],
)
def test_an_import_down_the_list_is_seen(text, statement, target, tmp_path):
    src = package(tmp_path, {**SOUND, "tasks/files.py": text.format(statement)})
    assert f"rpg.tasks.files imports {target}" in complaints(src)["upward"]


def test_the_table_of_public_names_is_followed(tmp_path):
    src = package(tmp_path, {**SOUND, "__init__.py": FRONT.replace("loss.policy", "cli")})
    assert complaints(src) == {"upward": ["rpg imports rpg.cli"]}


@pytest.mark.parametrize("text", ["{}\n", LAZY, TYPES])
def test_a_cycle_is_seen(text, tmp_path):
    files = {
        "training/a.py": "from .b import x\n",
        "training/b.py": "from . import c\n",
        "training/c.py": text.format("from .a import y"),
    }
    assert complaints(package(tmp_path, {**SOUND, **files})) == {
        "cycles": ["rpg.training.a -> rpg.training.b -> rpg.training.c -> rpg.training.a"],
        "crowded": ["training has 5 files"],
    }


def test_a_package_that_its_own_module_imports_is_a_cycle(tmp_path):
    src = package(tmp_path, {**SOUND, "tasks/task.py": "from . import Task\n"})
    assert complaints(src)["cycles"] == ["rpg.tasks -> rpg.tasks.task -> rpg.tasks"]


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"extra/__init__.py": ""}, {"strangers": ["extra has no place in the order"]}),
        ({"extra.py": ""}, {"strangers": ["extra has no place in the order"]}),
        ({"console.py": "import rich\n"}, {}),
        ({"console.py": "from . import __version__, loss\n"}, {"foreign": ["rpg.console imports rpg.loss"]}),
        ({"loss/policy.py": "def f():\n    import numpy.linalg\n"}, {"foreign": ["rpg.loss.policy imports numpy"]}),
        ({"loss/policy.py": "import torch.nn, os.path\nfrom .. import console\n"}, {}),
        ({"tasks/task.py": "import torch.nn\n"}, {"torch": ["rpg.tasks.task imports torch"]}),
        ({"tasks/task.py": LAZY.format("from torch import nn")}, {"torch": ["rpg.tasks.task imports torch"]}),
        ({"console.py": "import torch\n", "tasks/task.py": "from .. import console\n"}, {"torch": ["rpg.console"]}),
        ({"tasks/task.py": "from ..loss.policy import x\n"}, {"torch": ["rpg.loss.policy"]}),
        ({"tasks/task.py": LAZY.format("from ..loss.policy import x")}, {}),
        ({"tasks/task.py": TYPES.format("from ..loss.policy import x")}, {}),
        ({"cli.py": "class Task: ...\n"}, {"twice": ["Task: rpg.cli, rpg.tasks.task"]}),
        ({"cli.py": "def f():\n    class Task: ...\n"}, {"twice": ["Task: rpg.cli, rpg.tasks.task"]}),
        ({f"loss/data{n}.txt": "" for n in range(3)}, {"crowded": ["loss has 5 files"]}),
    ],
)
def test_each_rule_is_seen_broken(files, wrong, tmp_path):
    seen = complaints(package(tmp_path, {**SOUND, **files}))
    seen.pop("upward", None)  # what console may not import is also below it
    assert seen.keys() == wrong.keys()
    for rule, (line,) in wrong.items():
        assert any(line in complaint for complaint in seen[rule]), seen


def test_a_room_of_the_list_that_is_gone_is_seen(tmp_path):
    src = package(tmp_path, {name: text for name, text in SOUND.items() if name != "cli.py"})
    assert complaints(src) == {"strangers": ["cli is in the order and not in the source"]}


def test_the_architecture_page_lists_every_file():
    sys.path.insert(0, str(SRC.parents[1] / "scripts"))
    import make_architecture

    text = make_architecture.PAGE.read_text(encoding="utf-8")
    assert text == make_architecture.page(ROOMS), "run: python scripts/make_architecture.py"
