"""The documentation site: docs/ and what it links to, as pages for Zensical; then Zensical.

    python scripts/site/build.py [FOLDER] [--serve]     # FOLDER/html from FOLDER/pages; FOLDER is site/ unless given

The Markdown in docs/ is written for a code host, where README.md is a page and a link may lead to any file. Here each
page is copied with its links turned: README.md is the start page, docs/*.html lie in live/, and every other file that
is linked is a page of its own in source/. The navigation is docs/README.md: a page that is not in there is an error,
and so is a link to a file that does not exist. Anchors are checked by Zensical, and any warning of its is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PLACES = {  # pages outside docs/, and the one that would be an index
    "README.md": "index.md",
    "docs/README.md": "reading-order.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
API = {  # page: its title, the module that introduces it, the names on it
    "loss": (
        "Losses",
        "loss.objective",
        "PolicyLoss LossOutput algorithm algorithms Algorithm Advantage vocabulary_kl logit_score_sq",
    ),
    "clip": (
        "Clips",
        "loss.clip",
        "clip.Box clip.DualClip clip.RPGClip clip.KL3 clip.TrustRegion clip.Adaptive clip.Truncate clip.Unweighted "
        "clip.Taper clip.LogBox clip.Sigmoid clip.SoftWeight clip.curvature_keep clip.Clip clip.Seen clip.Limits "
        "clip.lambert_w",
    ),
    "gates": ("Gates", "loss.gates", "gates.HighEntropy gates.ClipCov gates.KLCov gates.Gate gates.Tokens"),
    "mismatch": (
        "Sampler mismatch",
        "loss.mismatch",
        "mismatch.TIS mismatch.MIS mismatch.IcePop mismatch.SequenceMask mismatch.Mismatch",
    ),
    "audit": (
        "The audit",
        "audit",
        "audit.check audit.Checked audit.AuditRow audit.BoxRow audit.TruncatedRow audit.resolve audit.run audit.Audit "
        "audit.Subject audit.measure.measure audit.Measurement audit.EnumeratedProblem audit.EnumeratedBatch",
    ),
    "train": ("Runs", "", "train evaluate sample merge Run"),
    "rollout": (
        "Engines",
        "rollout.native",
        "rollout.NativeEngine rollout.Engine rollout.Sampling rollout.Rollout",
    ),
    "kernels": ("Kernels", "kernels", "kernels.linear_logp kernels.linear_logp_kl kernels.head_logits"),
    "verify": (
        "Verified answers",
        "verify.judge",
        "verify.verify verify.verdict verify.Verdict verify.verify_reward verify.lenient_reward",
    ),
}
AS_WRITTEN = ("verl", "vLLM")  # titles that begin small
INTRODUCTION = "::: rpg.{}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".css": "css", ".js": "javascript", ".sh": "sh"}
CODE = re.compile(r"(^ *```.*?^ *```$|^~{8} .*?^~{8}$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[\w./-]+\.(?:md|html)\]|\])\(([^)\s]+)\)")  # a file's name as its text, or any text's end


class Wrong(Exception):
    """What stops the build, in one line."""


# ---- navigation ------------------------------------------------------------------------------------------------------


def order() -> dict[str, dict[str, str]]:
    """docs/README.md: its bold lines are sections, and the links below each of them pages with their titles."""
    text, short, listed = _read("docs/README.md"), _short_names(), {*PLACES} - {"CONTRIBUTING.md"}
    sections: dict[str, dict[str, str]] = {}
    for section, below in re.findall(r"^\*\*([^*\n]+)\*\*$(.*?)(?=^\*\*|\Z)", text, re.M | re.S):
        pages = sections[section] = {}
        for shown, path in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", below):
            name = os.path.normpath(f"docs/{path}")
            if name in listed or place_of(name).startswith("source/"):
                continue
            listed.add(name)
            title = short.get(name) or (_heading(name) if "." in shown else shown)
            pages[name] = title if title in AS_WRITTEN else title[0].upper() + title[1:]
    if missing := sorted({*_names("*.md"), *_names("*.html")} - listed):
        raise Wrong(f"docs/README.md, the reading order, is without {', '.join(missing)}")
    return sections


def _short_names() -> dict[str, str]:
    """What the README's table calls each page."""
    rows = re.findall(r"^\| [^|]+ \| (\[.*) \|$", _read("README.md"), re.M)
    return {name: text for row in rows for text, name in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", row)}


def _heading(name: str) -> str:
    found = re.search(r"^# (.+)", _read(name), re.M) if (ROOT / name).exists() else None
    if found is None:
        raise Wrong(f"docs/README.md: {name} is not there, or has no heading")
    return found[1]


def settings(folder: Path) -> str:
    """zensical.toml for a folder: with the navigation and, where pyproject.toml has one, the repository's address."""
    nav: list[object] = [{"Start": "index.md"}, {"Reading order": "reading-order.md"}]
    nav += [{section: [{title: place_of(name)} for name, title in pages.items()]} for section, pages in order().items()]
    nav.append({"API": [{title: f"api/{page}.md"} for page, (title, *_) in API.items()]})
    nav.append({"Changelog": "changelog.md"})
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    lines = [f"nav = {_toml(nav)}", f"site_description = {_toml(project['description'])}"]
    if address := project["urls"].get("Repository"):
        lines.append(f"repo_url = {_toml(address)}")
    text = _read("scripts/site/zensical.toml").replace("[project]\n", "\n".join(["[project]", *lines, ""]), 1)
    return text.replace('"src"', _toml(os.path.relpath(ROOT / "src", folder)))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


# ---- pages -----------------------------------------------------------------------------------------------------------


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Every file of the site before Zensical, and where it lies."""
    titles = {name: title for section in order().values() for name, title in section.items()}
    linked: set[str] = set()

    def turned(name: str, text: str) -> str:
        """Markdown with its links turned, and lists within lists as deep as Python's Markdown wants them."""
        parts = CODE.split(text)
        parts[::2] = [LINK.sub(lambda m: link(name, m[1], m[2]), part) for part in parts[::2]]
        return re.sub(r"^( +)(?=- )", r"\1\1", "".join(parts), flags=re.MULTILINE)

    def link(page: str, text: str, target: str) -> str:
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return f"{text}({target})"
        name = os.path.normpath(os.path.join(os.path.dirname(page), path))
        if name.startswith("..") or not (ROOT / name).exists():
            raise Wrong(f"{page}: link to {target}: no such file")
        if place_of(name).startswith("source/"):
            linked.add(name)
        shown = f"[{titles.get(name, text[1:-1])}]" if text.startswith("[") else text
        return f"{shown}({os.path.relpath(place_of(name), os.path.dirname(place_of(page)))}{hash_sign}{anchor})"

    for name in (*PLACES, *_names("*.md")):
        yield place_of(name), turned(name, _read(name))
    for name in _names("*.html"):  # made to stand alone: here with a link to where they lie
        yield place_of(name), _read(name).replace("<body>", "<body>\n" + _read("scripts/site/way_back.html"), 1)
    for name in (*_names("*.svg"), *_names("*.png")):
        yield place_of(name), (ROOT / name).read_bytes()
    for path in (HERE / "assets").iterdir():
        yield f"assets/{path.name}", path.read_bytes()
    for page, (title, module, names) in API.items():
        parts = [f"# {title}", *([INTRODUCTION.format(module)] if module else [])]
        yield f"api/{page}.md", "\n\n".join([*parts, *(f"::: rpg.{name}" for name in names.split())]) + "\n"
    done: set[str] = set()
    while waiting := sorted(linked - done):  # a page of source may link to more of it
        for name in waiting:
            text = turned(name, "\n\n".join(source(name)))
            yield place_of(name), f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n# `{name}`\n\n{text}\n"
        done.update(waiting)


def source(name: str) -> Iterator[str]:
    """A file as Markdown: its lines, a notebook's cells, or a folder's files."""
    path = ROOT / name
    if path.is_dir():
        yield "\n".join(f"- [{file.name}]({path.name}/{file.name})" for file in sorted(path.glob("*.py")))
    elif path.suffix == ".ipynb":
        for cell in json.loads(_read(name))["cells"]:
            text = "".join(cell["source"])
            code = cell["cell_type"] == "code"
            yield f"```python\n{text}\n```" if code else re.sub("^#", "##", text, flags=re.M)
    else:
        yield f'{"~" * 8} {LANGUAGES.get(path.suffix, "text")} linenums="1"\n{_read(name).rstrip()}\n{"~" * 8}'


def place_of(name: str) -> str:
    """Where a file of the repository lies among the pages."""
    folder, _, file = name.rpartition("/")
    if folder == "docs" and name not in PLACES and "." in file:
        return f"live/{file}" if file.endswith(".html") else file
    return PLACES.get(name) or f"source/{name}.md"


def _names(pattern: str) -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob(pattern)))
    return [name for name in found if name not in PLACES]


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- building --------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """The pages and the settings as Zensical takes them. What has not changed is left alone: its cache goes by that."""
    files = {folder / "pages" / place: content for place, content in pages()}
    for old in [path for path in (folder / "pages").glob("**/*") if path.is_file() and path not in files]:
        old.unlink()
    files[folder / "docstrings.py"] = _read("scripts/site/docstrings.py")
    files[folder / "zensical.toml"] = settings(folder)
    for path, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def build(folder: Path) -> None:
    """The whole site anew: a page from the cache would not say again what is wrong with it."""
    prepare(folder)
    shutil.rmtree(folder / "html", ignore_errors=True)
    line = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # its colours
    said = said.partition("Traceback")[0].strip()  # that its warnings stop it needs no traceback
    print(said)
    if done.returncode or "griffe" in said:  # what griffe finds wrong with a docstring is no warning to Zensical
        raise Wrong("not built: see above")


def serve(folder: Path) -> None:
    """The site at localhost:8000; a page that is open follows what is written."""
    prepare(folder)
    with subprocess.Popen([sys.executable, "-m", "zensical", "serve"], cwd=folder) as server:
        before = _written()
        while server.poll() is None:
            time.sleep(0.5)
            if (now := _written()) != before:
                before = now
                try:
                    prepare(folder)
                except Wrong as error:
                    print(f"the site: {error}", file=sys.stderr)


def _written() -> float:
    folders = [ROOT / name for name in ("docs", "examples", "scripts/site", "src/rpg")]
    paths = [*(ROOT / name for name in PLACES), *folders, *(path for each in folders for path in each.rglob("*"))]
    return max(path.stat().st_mtime for path in paths if "__pycache__" not in path.parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    parser.add_argument("--serve", action="store_true", help="build, show, and build again when something is written")
    arguments = parser.parse_args()
    try:
        (serve if arguments.serve else build)(arguments.folder.resolve())
    except Wrong as error:
        sys.exit(f"the site: {error}")
    except KeyboardInterrupt:
        pass
