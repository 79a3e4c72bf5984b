"""Recipes by name, builtin/dapo: they come with the package, and lie in recipes/ of a clone."""

from __future__ import annotations

from pathlib import Path

from .console import nearest

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE / "recipes", HERE.parents[1] / "recipes")  # a wheel's; a clone's, also where it is installed with -e
END = ".yaml"


def recipes() -> dict[str, Path]:
    """Every recipe's file by its name."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    return {path.relative_to(folder).as_posix().removesuffix(END): path for path in sorted(folder.rglob(f"*{END}"))}


def recipe_file(given: Path) -> Path:
    """The file that is meant: this one, or the recipe of this name."""
    if given.exists():
        return given
    name, known = given.as_posix().removeprefix("recipes/").removesuffix(END), recipes()
    if name in known:
        return known[name]
    ends = {path.rpartition("/")[2]: path for path in reversed(known)}  # dapo, for builtin/dapo
    near = ends.get(name) or nearest(name, known)
    hint = f"; did you mean {near}?" if near else "" if given.suffix else "; rpg recipes lists them"
    raise ValueError(f"{given}: no such file" + (f" or recipe{hint}" if hint else ""))
