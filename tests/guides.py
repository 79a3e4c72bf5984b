"""The pages of the docs: what is in them, and what in them is not true. Nothing that they show is run here.

Every complaint is one line. Commands go through the real parsers and settings; names through the syntax trees of
src/rpg, so that a page about verl can be read without verl.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import functools
import io
import re
import shlex
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("benchmarks", "docs", "examples", "recipes", "scripts", "src", "tests")  # folders: a path into one must exist
PROGRAMS = ("rpg", "make", "python", "python3", "torchrun", "pip")
OF_VERL = ("export.md", "scale.md", "verl.md", "verl-run.md")  # where `rollout.n` is a setting of verl
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]  # for running what a page shows


@dataclass(frozen=True)
class Block:
    """Text between fences."""

    language: str
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, *languages: str) -> list[str]:
    """What stands between fences of these languages."""
    return [block.text for block in _blocks(text) if block.language in languages]


def _blocks(text: str) -> list[Block]:
    fenced = re.findall(r"^ *```(\w*)[^\n`]*\n(.*?)^ *```", text, re.S | re.M)
    return [Block(language, textwrap.dedent(body)) for language, body in fenced]


def _prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def _spans(text: str) -> list[str]:
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", _prose(text))]


# ---- links -----------------------------------------------------------------------------------------------------------


def wrong_links(page: Path, text: str) -> Iterator[str]:
    """Relative links to files that are not there, or to headings that their page has not."""
    prose = re.sub(r"`[^`\n]*`", "", _prose(text))
    for link in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|(?:href|src)=\"([^\"]+)\"", prose):
        target = "".join(link)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or not path.resolve().is_relative_to(ROOT):
            yield f"link to {target}: no such file"
        elif anchor and anchor not in _anchors(path, text if path == page else None):
            yield f"link to {target}: no such heading"


def _anchors(path: Path, text: str | None) -> set[str]:
    text = path.read_text(encoding="utf-8") if text is None else text
    if path.suffix != ".md":
        return {f"L{n + 1}" for n in range(text.count("\n"))} | set(re.findall(r"\bid=[\"']([^\"']+)", text))
    anchors: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#+ +(.+?) *#*$", _prose(text), re.M):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in anchors)
        anchors.add(f"{slug}-{again}" if again else slug)
    return anchors


# ---- commands --------------------------------------------------------------------------------------------------------


def wrong_commands(text: str) -> Iterator[str]:
    """Commands that would be refused: in code blocks whole lines, in the text whatever of a line is given there."""
    for block in _blocks(text):
        for line in _lines(block):
            yield from _named(line, _wrong(_split(line), whole=True))
        if block.language == "python":  # "# file.py: rpg train …": how the block is used
            for line in re.findall(r"^# \w+\.py: (rpg .*)", block.text, re.M):
                yield from _named(line, _wrong(_split(line), whole=True))
    for span in _spans(text):
        yield from _named(span, _wrong(_split(span), whole=False))


def _lines(block: Block) -> list[str]:
    """The commands of a block. One without a language shows what was printed, with its commands first or behind a $."""
    lines = block.text.replace("\\\n", " ").splitlines()
    typed = [line for line in lines if line.startswith("$ ")]
    if block.language == "" and (typed or (_split(lines[0]) or [""])[0] not in PROGRAMS):
        return typed
    return lines if block.language in ("", "sh", "bash", "console") else []


def _named(line: str, complaints: Iterator[str]) -> Iterator[str]:
    for complaint in complaints:
        yield f"`{' '.join(line.split())}`: {complaint}"


def _split(line: str) -> list[str]:
    line = re.sub(r"(^|\s)#\s.*", "", line.removeprefix("$ "))
    try:
        words = shlex.split(line)
    except ValueError:  # an apostrophe: this is prose
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def _wrong(words: list[str], whole: bool) -> Iterator[str]:
    if not words or words[0] not in PROGRAMS:
        return
    for word in words:
        path = word.partition(":")[0]
        if path.partition("/")[0] in OURS and "/" in path and not _exists(path):
            yield f"there is no {path}"
    program, rest = words[0], words[1:]
    if program in ("python", "python3", "torchrun") and "rpg" in rest and rest[rest.index("rpg") - 1] == "-m":
        program, rest = "rpg", rest[rest.index("rpg") + 1 :]
    if program == "make":
        targets = [word for word in rest if re.fullmatch(r"[a-z][\w-]*", word)]
        if whole or targets[:1] == rest[:1]:  # in the text "make" may be the verb
            yield from (f"no target {word} in the Makefile" for word in targets if word not in make_targets())
    elif program == "pip":
        named = [extra for word in rest for extras in re.findall(r"\[([\w,]+)\]", word) for extra in extras.split(",")]
        yield from (f"no extra {extra} in pyproject.toml" for extra in named if extra not in _extras())
    elif program in ("python", "python3") and rest and rest[0].endswith(".py"):
        yield from _wrong_script(rest[0], rest[1:])
    elif program == "rpg":
        yield from _wrong_line(rest) if whole and "…" not in rest else _wrong_flags(rest)


def _exists(path: str) -> bool:
    return any(ROOT.glob(re.sub(r"\$\w+|[A-Z]{3,}", "*", path.rstrip("/"))))  # recipes/builtin/NAME.yaml: one of them


@functools.cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@functools.cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def _wrong_script(name: str, args: list[str]) -> Iterator[str]:
    path = ROOT / name
    if not path.exists():
        yield f"there is no {name}"
        return
    source = path.read_text(encoding="utf-8")
    args = args[: args.index("--")] if "--" in args else args  # what stands behind goes on to rpg train
    for flag in (word.partition("=")[0] for word in args if word.startswith("--")):
        if f'"{flag}"' not in source:
            yield f"{name} knows no {flag}"


def _wrong_line(args: list[str]) -> Iterator[str]:
    """A whole command: parsed as it would be, settings built, the method made. Files of the reader's need not exist."""
    from rpg.cli import build_parser
    from rpg.find_recipe import recipe_file
    from rpg.run.config import Config
    from rpg.run.settings import build, given
    from rpg.training.setup import method_of

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed = build_parser().parse_args(args)
    except SystemExit as stop:
        if stop.code:
            yield said.getvalue().strip()
        return
    if parsed.command in ("train", "eval", "export"):
        file = getattr(parsed, "config", None) or getattr(parsed, "recipe", None)
        try:
            if file and not (ROOT / file).exists():  # a recipe's name, or a file of the reader's
                file = recipe_file(file) if "/" in str(file) and file.suffix != ".yaml" else None
            else:
                file = ROOT / file if file else None
            method_of(build(Config, file=file, flags=given(parsed, Config)))
        except ValueError as error:
            yield str(error)
    if parsed.command == "audit":
        named = (name for name in parsed.losses if ":" not in name)
        yield from (f"no algorithm {name}" for name in named if not fnmatch.filter(algorithms(), name))


def _wrong_flags(args: list[str]) -> Iterator[str]:
    """Of part of a command: the commands and flags in it."""
    parser: argparse.ArgumentParser = _parser()
    for word in args:
        below = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if below is not None and not word.startswith("-") and word not in ("…", "COMMAND"):
            unknown = [name for name in word.split("|") if name not in below]  # trl|verl: either
            if unknown:
                said = len(args) == 1 or any(word.startswith("-") for word in args)  # else something that rpg prints
                yield from (f"no command {name}" for name in unknown if said)
                return
            parser = below[word.partition("|")[0]]
        elif re.match(r"--\w", word) and not _takes(parser, word):
            yield f"{parser.prog} knows no {word}"


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from rpg.cli import build_parser

    return build_parser()


def _takes(parser: argparse.ArgumentParser, word: str) -> bool:
    flag, known = word.partition("=")[0], parser._option_string_actions
    return flag in known or flag.startswith(tuple(name.removesuffix("KEY") for name in known if name.endswith(".KEY")))


@functools.cache
def algorithms() -> frozenset[str]:
    import rpg

    return frozenset(rpg.algorithms())


@functools.cache
def _flags() -> frozenset[str]:
    """Every flag of every command and script, and those of torchrun, pip and pytest that the docs speak of."""
    flags, queue = {"--nproc-per-node", "--shutdown-timeout", "--no-deps", "--basetemp"}, [_parser()]
    for parser in queue:
        flags |= set(parser._option_string_actions)
        queue += [p for a in parser._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
    for script in (
        path for folder in OURS for path in (ROOT / folder).glob("**/*.py") if folder not in ("src", "tests")
    ):
        flags |= set(re.findall(r"\"(--[\w-]+)\"", script.read_text(encoding="utf-8")))
    return frozenset(flags)


# ---- settings --------------------------------------------------------------------------------------------------------


def wrong_settings(page: Path, text: str) -> Iterator[str]:
    """Settings that a run does not have: `rollout.samples`, `--loss.beta`, and those in blocks of YAML."""
    from rpg.run.config import Config
    from rpg.run.settings import build, leaves
    from rpg.study.design import read_study

    known = leaves(Config)
    sections = {path.partition(".")[0] for path in known if "." in path}
    for span in _spans(text):
        for flag, name in re.findall(r"(?:^| )(--)?([a-z]\w*(?:\.\w+)+)(?=$|[ =])", span):
            section = name.partition(".")[0]
            opened = any(leaf.open and name.startswith(f"{path}.") for path, leaf in known.items())
            ours = section in sections and (flag or page.name not in OF_VERL) and not name.endswith((".py", ".yaml"))
            if ours and name not in known and not opened:
                yield f"no setting {flag}{name}"
        for flag in re.findall(r"^--\w[\w-]*(?=$|[ =])", span):
            if flag not in _flags():
                yield f"nothing has a flag {flag}"
    for block in blocks(text, "yaml"):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(block)
            file.flush()
            try:
                read_study(Path(file.name)) if "\ncompare:" in f"\n{block}" else build(Config, file=Path(file.name))
            except ValueError as error:
                yield str(error).replace(file.name, "YAML")


# ---- Python ----------------------------------------------------------------------------------------------------------


def wrong_python(text: str) -> Iterator[str]:
    """Blocks that do not compile, and names of rpg's that are not there."""
    after = ["\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-") for diff in blocks(text, "diff")]
    for code in [*blocks(text, "python"), *after]:
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            yield f"{code.strip().splitlines()[0]!r} … does not compile: {error.msg}"
            continue
        for node in ast.walk(tree):
            modules, names = [], []
            if isinstance(node, ast.ImportFrom):
                modules, names = [str(node.module)], [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            missing = [name for name in modules if not _is_module(name)] or [n for n in names if not resolves(n)]
            yield from (f"there is no {name}" for name in missing if re.match(r"rpg(\.\w+)*$", name))
    for span in _spans(text):
        name = re.match(r"rpg(\.\w+)+(?=$|[(: ])", span)
        if name and not resolves(name[0]):
            yield f"there is no {name[0]}"


def wrong_paths(text: str) -> Iterator[str]:
    """Files and folders of ours that are gone: `recipes/builtin/grpo.yaml`, `training/loop.py`, src/rpg/ in a block."""
    printed = " ".join(blocks(text, ""))
    for path in re.findall(r"(?:^|\s)((?:[\w.-]+/)+[\w.-]*)(?=$|[\s:])", "\n".join([*_spans(text), printed])):
        path = path.rstrip(".")
        if path.partition("/")[0] in OURS and not _exists(path):
            yield f"there is no {path}"
        if path.partition("/")[0] not in OURS and path.endswith(".py") and not any(ROOT.glob(f"src/**/{path}")):
            yield f"there is no {path}"


def _is_module(dotted: str) -> bool:
    path = ROOT / "src" / Path(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def resolves(dotted: str) -> bool:
    """Whether rpg.kernels.linear_logp is a module or a name in one, by the source. Classes are not looked into."""
    path, names = ROOT / "src", dotted.split(".")
    while names and (path / names[0]).is_dir():
        path = path / names.pop(0)
    if names and (path / f"{names[0]}.py").is_file():
        path = path / f"{names.pop(0)}.py"
    file = path / "__init__.py" if path.is_dir() else path
    if not names:
        return True
    if not file.exists():
        return False
    defined, homes = _defined(file)
    if names[0] in homes:
        home = homes[names[0]].split(".")
        return resolves(".".join(["rpg", *home, *names[home[-1] == names[0] :]]))
    return names[0] in defined


@functools.cache
def _defined(file: Path) -> tuple[frozenset[str], dict[str, str]]:
    """The names of a module, and of a table of names that are loaded when asked for: where they come from."""
    names: set[str] = set()
    homes: dict[str, str] = {}
    queue: list[ast.AST] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    for node in queue:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            if file.parent.name == "rpg" and isinstance(node.value, ast.Dict):
                homes |= ast.literal_eval(node.value)
        elif isinstance(node, ast.If | ast.Try):
            queue += [*node.body, *node.orelse]
    return frozenset(names), homes


def wrong(page: Path, text: str) -> list[str]:
    """Everything on a page that is not so."""
    complaints = [*wrong_links(page, text), *wrong_commands(text), *wrong_settings(page, text)]
    return list(dict.fromkeys([*complaints, *wrong_python(text), *wrong_paths(text)]))
