"""The documentation site: it is built without a warning, and every link in it leads somewhere."""

import html
import inspect
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

import rpg

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"<(\w+)\s[^>]*?\b(?:href|src)=[\"']([^\"']*)[\"']")
ID = re.compile(r"\b(?:id|name)=[\"']?([^\"'\s>]+)")


@pytest.fixture(scope="module")
def pages(site):
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_not_one_warning(site):
    said = (site.parent / "said").read_text(encoding="utf-8")
    assert re.fullmatch(r"0\nBuild started\nNo issues found\nBuild finished in [\d.]+s\n", said), said


def test_every_link_and_anchor_leads_somewhere(site, pages):
    anchors = {path: {html.unescape(name) for name in ID.findall(text)} for path, text in pages.items()}
    seen, dead = 0, []
    for page, text in pages.items():
        for tag, link in {*LINK.findall(text)}:
            if re.match(r"[a-z]+:", link):
                if tag != "a" and not link.startswith("data:"):
                    dead.append(f"{page.relative_to(site)}: <{tag}> loads {link}")  # nothing comes from the net
                continue
            seen += 1
            path, _, anchor = unquote(html.unescape(link)).partition("#")
            home = site if path.startswith("/") else page.parent  # 404.html is shown at any address
            target = (home / path.lstrip("/")).resolve() if path else page
            if not target.is_file() or (anchor and target in anchors and anchor not in anchors[target]):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []
    assert seen > 10_000


def test_every_page_is_in_the_navigation(site, pages):
    navigation = pages[site / "index.html"].partition("<article")[0]
    linked = {link.removeprefix("./") for _, link in LINK.findall(navigation)}
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"{path.stem}.html" in linked
    for name in ("audit", "explorer", "gsm8k", "report"):
        assert f"live/{name}.html" in linked
        assert 'href="../index.html"' in pages[site / "live" / f"{name}.html"]  # and back
    assert {"contributing.html", "changelog.html", "reading-order.html"} <= linked


def test_no_markdown_is_left(site, pages):
    for page, text in pages.items():
        if page.parent in (site, site / "api"):
            article = text.partition("<article")[2].partition("</article")[0]
            prose = re.sub(r"<[^>]+>", "", re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.S))
            assert not re.search(r"\]\(|\*\*|`|\|---|^\s*- |:::", prose, re.M), page


def test_nothing_says_where_it_was_built(site):
    for path in site.rglob("*"):
        assert path.suffix not in (".html", ".js", ".json", ".xml") or str(ROOT).encode() not in path.read_bytes()


def test_every_public_name_is_in_the_api(site, pages):
    ids = {name for page, text in pages.items() if page.parent.name == "api" for name in ID.findall(text)}
    public = [("rpg", name) for name in rpg.__all__]
    for module in ("clip", "gates", "mismatch", "audit", "verify", "kernels"):
        public += [(f"rpg.{module}", name) for name in import_module(f"rpg.{module}").__all__]
    for module, name in public:
        thing = getattr(import_module(module), name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert {f"{module}.{name}", f"{module}.{name}.{name}"} & ids, f"{module}.{name}"
    assert "rpg.rollout.NativeEngine.generate" in ids


def test_arguments_are_tables(site, pages):
    page = pages[site / "api" / "loss.html"]
    row = re.search(r"<tr[^>]*>\s*<td>\s*<code>beta</code>.*?</tr>", page, re.S)
    assert "strength of the KL term." in row[0]
    assert "0.0001" in row[0]


SMALL = {  # a project of a few pages
    "README.md": "# A project\n\n[losses](docs/losses.md)\n",
    "docs/README.md": "# Order\n\n**First hour**\n\n1. [losses.md](losses.md): all of them.\n",
    "docs/losses.md": "# Losses\n\n## One table\n\n[here](#one-table), [code](../src/rpg/loss/clip.py)\n",
    "CONTRIBUTING.md": "# Contributing\n",
    "CHANGELOG.md": "# Changelog\n",
}


@pytest.fixture
def built(python, tmp_path):
    """What is said when the small project is built, with some more text in one of its files."""
    shutil.copytree(ROOT / "scripts" / "site", tmp_path / "scripts" / "site")
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    (tmp_path / "docs").mkdir()

    def build(name, more):
        for file, text in {**SMALL, name: SMALL.get(name, "") + more}.items():
            (tmp_path / file).write_text(text, encoding="utf-8")
        line = [python, tmp_path / "scripts" / "site" / "build.py"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=180)
        return done.returncode, done.stdout + done.stderr

    return build


def test_a_dead_link_stops_the_build(built):
    more = "\n[gone](../src/rpg/gone.py)\n"
    assert built("docs/losses.md", more) == (1, "the site: docs/losses.md: link to ../src/rpg/gone.py: no such file\n")


def test_a_page_that_is_not_in_the_reading_order_stops_the_build(built):
    said = "the site: docs/README.md, the reading order, is without docs/new.md\n"
    assert built("docs/new.md", "# New\n") == (1, said)


def test_a_docstring_that_cannot_be_read_stops_the_build(built, tmp_path):
    path = tmp_path / "src" / "rpg" / "loss" / "policy_loss.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("    beta: strength of", "    betta: strength of"), encoding="utf-8")
    code, said = built("docs/losses.md", "")
    assert code == 1
    assert "'betta' does not appear" in said


def test_a_dead_anchor_stops_the_build(built):
    code, said = built("docs/losses.md", "\n[gone](#a-heading-that-is-gone)\n")
    assert code == 1
    assert "1 issue found" in said
    assert "#a-heading-that-is-gone" in said
    assert built("docs/losses.md", "\n[gone](#a-heading-that-is-gone)\n")[0] == 1  # again, though it has a cache
