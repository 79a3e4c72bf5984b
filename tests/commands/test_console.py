"""What users read, whatever the command: text of others, and how to install what is missing."""

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rpg import console
from rpg.console import choose, install, nearest, printable, steps_text

CLONE = Path(console.__file__).parents[2]


def test_printable_is_one_line_that_moves_no_cursor():
    for text in ("plain", "é 中 🙂 עברית \\frac{1}{2}", "zero\u200dwidth joins emoji 👩\u200d🔬"):
        assert printable(text) == text
    turning = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    controls = [*range(0x20), *range(0x7F, 0xA0), *turning]
    shown = printable("".join(map(chr, [*controls, 0xD800, 0xDFFF])))
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.count("\\") == len(controls) + 2
    assert printable("\x1b[2J\n") == "\\x1b[2J\\n"


def test_a_suggestion_is_blind_to_case_and_knows_what_others_say():
    assert nearest("DAPO", ["dapo", "grpo"]) == "dapo"
    assert nearest("bf16", ["Bfloat16", "float32"]) == "Bfloat16"
    assert nearest("x", ["dapo"]) is None
    assert choose("option", "Epsilon", ["low", "up"], {"high": "epsilon", "low": "clip epsilon"}) == (
        "unknown option 'Epsilon'. Did you mean 'low'? Known: low, up"
    )


def test_one_step_is_no_steps():
    assert [steps_text(n) for n in (0, 1, 12)] == ["0 steps", "1 step", "12 steps"]


@pytest.fixture
def pip_beside(monkeypatch):
    """pip on the path is that of the Python that runs."""
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).parent / name))


def test_in_a_clone_an_extra_comes_from_the_clone(pip_beside, monkeypatch, tmp_path):
    monkeypatch.chdir(CLONE)
    assert install("rpg-rl[peft]") == "pip install -e '.[peft]'"
    monkeypatch.chdir(CLONE.parent)
    assert install("rpg-rl[peft]") == f"pip install -e {shlex.quote(f'{CLONE.name}[peft]')}"
    monkeypatch.chdir(tmp_path)
    assert install("rpg-rl[peft]") == f"pip install -e {shlex.quote(f'{CLONE}[peft]')}"
    assert install("datasets") == "pip install datasets"
    assert install("trl>=1.16,<1.17") == "pip install 'trl>=1.16,<1.17'"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "rpg-rl[peft]"),
        ({"url": "file:///home/me/my%20rpg", "dir_info": {}}, "rpg-rl[peft] @ file:///home/me/my%20rpg"),
        ({"url": "https://a.b/rpg", "vcs_info": {"vcs": "git"}}, "rpg-rl[peft] @ git+https://a.b/rpg"),
    ],
)
def test_outside_one_it_comes_from_where_rpg_came(pip_beside, monkeypatch, tmp_path, origin, requirement):
    class Installed(metadata.Distribution):
        def read_text(self, filename):
            return None if origin is None else json.dumps(origin)

        def locate_file(self, path):
            return tmp_path

    monkeypatch.setattr(console, "__file__", str(tmp_path / "site-packages/rpg/console.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert install("rpg-rl[peft]") == f"pip install {shlex.quote(requirement)}"


def test_into_the_python_that_runs_even_if_another_pip_is_on_the_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/elsewhere/{name}")
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(console, "find_spec", lambda name: object())
    assert install("datasets") == ".venv/bin/python -m pip install datasets"
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    assert install("datasets") == "uv pip install --python .venv/bin/python datasets"


def test_no_message_names_an_install_command_of_its_own():
    for path in (CLONE / "src").rglob("*.py"):
        if path.name not in ("console.py", "card.py"):  # a card is for machines that are not this one
            assert "pip install" not in path.read_text(encoding="utf-8"), path
    for path in [*(CLONE / "docs").rglob("*.md"), CLONE / "README.md", CLONE / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        assert "pip install 'rpg-rl" not in text, f"{path}: rpg-rl is not on a registry; pip install -e '.[extra]'"
        assert "pip install rpg" not in text, path
