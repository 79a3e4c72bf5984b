"""The wheel: built, checked, put into bare environments with nothing beside it but what it asks for, and run there."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from running import TINY

ROOT = Path(__file__).parents[2]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RPG_", "PIP_"))}
LOSS = """
import sys, torch, rpg
method = rpg.algorithm("dapo")
old = torch.randn(4, 5).log_softmax(-1)
logp = old.clone().requires_grad_()
advantages = method.advantage(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
method.loss(logp, old, advantages, torch.ones(4, 5)).loss.backward()
assert logp.grad.abs().sum() > 0
print(rpg.__file__, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def run(*command: object, cwd: Path | None = None, code: int = 0) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def python(*command: object) -> str:
    """With the tools of this environment."""
    where = os.pathsep.join(path for path in sys.path if path and Path(path) != ROOT / "src")
    return run("env", f"PYTHONPATH={where}", sys.executable, *command)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the sdist, as an installer without a wheel would make it."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def needed(requirements: Iterable[str], extras: Iterable[str] = ()) -> dict[str, importlib.metadata.Distribution]:
    """What installing these would bring, by name: from the metadata of what is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = [(Requirement(text), extra) for text in requirements for extra in ("", *extras)]
    for requirement, extra in queue:
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            inner = found[name].requires or ()
            queue += [(Requirement(text), more) for text in inner for more in ("", *requirement.extras)]
    return found


class Bare:
    """An environment in which the wheel is installed, beside links to what it asks for and to nothing else."""

    def __init__(self, folder: Path, wheel: Path, extras: tuple[str, ...] = ()) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        python("-m", "pip", "--python", self.bin / "python", "install", "-q", "--no-deps", "--no-index", wheel)
        (site,) = folder.glob("lib/python*/site-packages")
        (metadata,) = site.glob("rpg_rl-*.dist-info/METADATA")
        asked = message_from_string(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist")
        self.brought = needed(asked, extras)
        for distribution in self.brought.values():
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))

    def python(self, *command: object, code: int = 0) -> str:
        return run(self.bin / "python", *command, cwd=self.folder, code=code)

    def rpg(self, *command: object, code: int = 0) -> str:
        return run(self.bin / "rpg", *command, cwd=self.folder, code=code)


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("core"), wheel)


@pytest.fixture(scope="module")
def trains(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("train"), wheel, ("train",))


def test_it_is_whole(wheel):
    """Sound for a registry; every module and recipe is in it; its page has no link that leads nowhere."""
    assert "FAILED" not in python("-m", "twine", "check", "--strict", *wheel.parent.iterdir())
    python("-m", "check_wheel_contents", wheel)
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.startswith("rpg_rl-")}
        metadata = file.read(next(n for n in file.namelist() if n.endswith("dist-info/METADATA"))).decode()
    source = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "rpg").rglob("*") if path.is_file()}
    recipes = {"rpg" / path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert names == {path.as_posix() for path in source | recipes if path.suffix != ".pyc"}
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", metadata)
    assert "\n# rpg: " in metadata


def test_the_core_needs_torch_and_little_else(core):
    around_torch = {*needed(["torch"]), *needed(["numpy"])}
    assert {*core.brought} - around_torch == {*needed(["rich"])} - around_torch
    where, *loaded = core.python("-W", "error::UserWarning", "-c", LOSS).split()
    assert Path(where).is_relative_to(core.folder)
    assert not {"transformers", "datasets", "yaml", "rich", "tensorboard", "safetensors", "pyarrow"} & {*loaded}
    core.python("-c", "import yaml", code=1)  # it is not even there


def test_what_the_core_can_and_cannot(core):
    assert 'rpg.algorithm("dapo", option=…)' in core.rpg("algorithms", "dapo")
    assert "What is wrong, recognised" not in core.rpg("audit", "dapo", "--seeds", "1", "--divergence", "none")
    for command in ("train", "recipes", "report"):
        (line,) = core.rpg(command, *["x"][: command == "report"], code=2).splitlines()
        assert line.startswith(f"rpg {command} needs more than the core: ")
        assert "rpg-rl[train]" in line
    *_, line = core.python("-c", "from rpg import train", code=1).splitlines()
    assert line.startswith("ImportError: rpg.train needs more than the core: ")


def test_with_the_extra_it_trains(trains):
    python("-m", "pip", "--python", trains.bin / "python", "check")
    assert "gsm8k/qwen2.5-coder-0.5b/dapo" in trains.rpg("recipes")
    out = trains.rpg("train", "--config", "builtin/dapo", "--steps", "2", *TINY, "--output", "mine")
    assert "2 steps in" in out
    assert "algorithm: dapo" in (trains.folder / "mine" / "config.yaml").read_text(encoding="utf-8")
    assert (trains.folder / "mine" / "report.html").is_file()
