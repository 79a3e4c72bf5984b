"""Nested frozen dataclasses from YAML and flags, and back. Knows no field by name; errors are one-line ValueErrors."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import itertools
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)|[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)")
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True)
class Leaf:
    """One setting: ``rollout.temperature``."""

    path: str
    hint: Any  # its type, without the None
    optional: bool
    default: Any
    doc: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def open(self) -> bool:
        """Takes any key: a dict."""
        return get_origin(self.hint) is dict or self.hint is dict

    @property
    def flag(self) -> str:
        return f"--{self.path}"


def leaves(cls: type) -> Mapping[str, Leaf]:
    """Every setting by its path, in the order of the fields."""
    return {leaf.path: leaf for leaf in _leaves(cls, "")}


def flat(config: Any) -> dict[str, Any]:
    """Every value by its path, the keys of a dict as paths of their own."""
    found: dict[str, Any] = {}
    for path, leaf in leaves(type(config)).items():
        value = _at(config, path)
        found |= {f"{path}.{key}": v for key, v in value.items()} if leaf.open else {path: value}
    return found


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """What two configs of one class do not share, by path; a key that only one dict has is None in the other."""
    first, second = flat(a), flat(b)
    paths = [*first, *(path for path in second if path not in first)]
    missing = object()
    changed = [path for path in paths if first.get(path, missing) != second.get(path, missing)]
    return {path: (first.get(path), second.get(path)) for path in changed}


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _leaves(cls: type, prefix: str) -> Iterator[Leaf]:
    hints, docs = get_type_hints(cls), _docs(cls)
    for f in fields(cls):
        hint = hints[f.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]
            continue
        optional = get_origin(hint) in (Union, types.UnionType)
        if optional:
            (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        default = f.default if f.default_factory is MISSING else f.default_factory()
        yield Leaf(f"{prefix}{f.name}", hint, optional, default, docs.get(f.name, ""))


def _sections(cls: type, prefix: str = "") -> Iterator[str]:
    for f, hint in ((f, get_type_hints(cls)[f.name]) for f in fields(cls)):
        if is_dataclass(hint):
            yield f"{prefix}{f.name}"
            yield from _sections(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]


def _docs(cls: type) -> dict[str, str]:
    """The string under each field, as one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _module_docs(base.__module__).get(base.__name__, {}) if is_dataclass(base) else {}
    return found


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """The same by class; empty where there is no source, as in a frozen program."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line, below in itertools.pairwise(node.body):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found.setdefault(node.name, {})[ast.unparse(line.target)] = " ".join(str(below.value.value).split())
    return found


# ---- flags -----------------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """A flag for each setting, grouped by section. Those not given leave nothing in the namespace: see given()."""
    known = leaves(cls)
    groups: dict[str, Any] = {"": parser}
    for leaf in known.values():
        name = leaf.path if leaf.open else leaf.section
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], leaf)
    parser.allow_abbrev = False  # a mistyped flag is refused, not guessed
    parse, opened = parser.parse_known_args, tuple(f"{leaf.flag}." for leaf in known.values() if leaf.open)

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """argparse cannot take flags whose names are not known beforehand (--loss.KEY), nor suggest the nearest one."""
        rest, pairs = _take(parser, sys.argv[1:] if args is None else list(args), opened)
        namespace, rest = parse(rest, namespace)
        for arg in rest:
            if arg.startswith("--") and arg != "--":
                given = arg.split("=")[0]
                parser.error(_unknown_flag(given, [s for s in parser._option_string_actions if s.startswith("--")]))
        for path, value in pairs.items():
            setattr(namespace, path, value)
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The settings among parsed arguments: what build() takes as flags."""
    known = leaves(cls)
    return {path: v for path, v in vars(args).items() if path in known or _opened(path, known)}


def _take(
    parser: argparse.ArgumentParser, args: list[str], opened: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """--loss.KEY VALUE and --loss.KEY=VALUE, out of the arguments."""
    rest: list[str] = []
    pairs: dict[str, str] = {}
    left = iter(args)
    for arg in left:
        if arg == "--":
            rest += [arg, *left]
        elif opened and arg.startswith(opened):
            flag, equals, text = arg.partition("=")
            value = text if equals else next(left, None)
            if value is None or (not equals and value.startswith("--")):
                parser.error(f"argument {flag}: expected one argument")
            pairs[flag[2:]] = value
        else:
            rest.append(arg)
    return rest, pairs


def _add_flag(group: Any, leaf: Leaf) -> None:
    if leaf.open:
        group.add_argument(
            f"{leaf.flag}.KEY", dest=leaf.path, metavar="VALUE", default=argparse.SUPPRESS, help=_escape(leaf.doc)
        )
        return
    options: dict[str, Any] = {"type": lambda text: _of_flag(leaf, text)}
    if leaf.hint is bool:
        options |= {"nargs": "?", "const": True, "metavar": "true|false|none" if leaf.optional else "true|false"}
    elif get_origin(leaf.hint) is Literal:
        options["metavar"] = "{" + ",".join([*map(str, get_args(leaf.hint)), *["none"][: leaf.optional]]) + "}"
    else:
        options["metavar"] = _metavar(leaf.hint)
    text = f"{leaf.doc} (default: {_text(leaf.default)})".strip()
    group.add_argument(leaf.flag, dest=leaf.path, default=argparse.SUPPRESS, help=_escape(text), **options)


def _of_flag(leaf: Leaf, text: str) -> Any:
    try:
        return _value(leaf, text, text=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _metavar(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return ",".join(_metavar(kind) for kind in get_args(hint))
    return {float: "X", int: "N"}.get(hint, "TEXT")


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _text(value: Any) -> str:
    """A default as one would write it behind the flag."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value) or "''"


# ---- from files and flags --------------------------------------------------------------------------------------------


def build(cls: type[T], *, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> T:
    """Flags over the file over the defaults. Flags: values by path, as text or already of their type."""
    known = leaves(cls)
    values: dict[str, Any] = {}
    if file is not None:
        try:
            for path, value in _flatten(_read(file), known, list(_sections(cls))):
                if path in values:
                    raise ValueError(f"{path} is given twice")
                values[path] = _checked(path, value, known, text=False)
        except ValueError as error:
            raise ValueError(" ".join(f"{file}: {error}".split())) from None
    for path, value in (flags or {}).items():
        if path not in known and not _opened(path, known):
            raise ValueError(_unknown_flag(f"--{path}", [leaf.flag for leaf in known.values()]))
        values[path] = _checked(path, value, known, text=isinstance(value, str))
    return _make(cls, "", values)


def _make(cls: type[T], prefix: str, values: Mapping[str, Any]) -> T:
    found: dict[str, Any] = {}
    for f, hint in ((f, get_type_hints(cls)[f.name]) for f in fields(cls)):  # type: ignore[arg-type]
        path = f"{prefix}{f.name}"
        below = {key: value for key, value in values.items() if key.startswith(f"{path}.")}
        if is_dataclass(hint):
            found[f.name] = _make(hint, f"{path}.", below)  # type: ignore[arg-type]
        elif path in values:
            found[f.name] = values[path]
        if below and not is_dataclass(hint):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            found[f.name] = found.get(f.name, default) | {key.removeprefix(f"{path}."): v for key, v in below.items()}
    return cls(**found)


def _opened(path: str, known: Mapping[str, Leaf]) -> Leaf | None:
    """The dict that the path is a key of."""
    return next((leaf for leaf in known.values() if leaf.open and path.startswith(f"{leaf.path}.")), None)


def _checked(path: str, value: Any, known: Mapping[str, Leaf], text: bool) -> Any:
    try:
        if path not in known:  # the key of a dict
            return _scalar(value) if text else value
        return _value(known[path], value, text)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _value(leaf: Leaf, value: Any, text: bool) -> Any:
    """The value as its type, or a ValueError that says what it must be. Text, from a flag, is read; YAML is already."""
    if leaf.optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    return _typed(leaf.hint, value, text)


def _typed(hint: Any, value: Any, text: bool) -> Any:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint_text = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"must be one of {', '.join(choices)}; got {_shown(value)}{hint_text}")
        return value
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint), value, text)
    if get_origin(hint) is dict or hint is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"must be settings by name; got {_shown(value)}")
        return dict(value)
    read = {str: _str, bool: _bool, int: _int, float: _float}.get(hint)
    if read is None:
        raise TypeError(f"settings of type {hint} are not supported")
    return read(value, text)


def _str(value: Any, text: bool) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text (in quotes, if need be); got {_shown(value)}")
    return value


def _bool(value: Any, text: bool) -> bool:
    if text and isinstance(value, str):
        value = SWITCH.get(value.lower(), value)
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false; got {_shown(value)}")
    return value


def _int(value: Any, text: bool) -> int:
    number = _number(value) if not isinstance(value, str) or text else None
    if number is None or not math.isfinite(number) or number != int(number):
        raise ValueError(f"must be a whole number; got {_shown(value)}")
    return int(number)


def _float(value: Any, text: bool) -> float:
    number = _number(value)
    try:
        if number is None or math.isnan(number):
            raise ValueError
        return float(number)
    except (ValueError, OverflowError):
        raise ValueError(f"must be a number; got {_shown(value)}") from None


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _tuple(kinds: tuple[Any, ...], value: Any, text: bool) -> tuple[Any, ...]:
    items = value.split(",") if isinstance(value, str) and text else value
    if not isinstance(items, (list, tuple)) or len(items) != len(kinds):
        raise ValueError(f"must be {len(kinds)} values, {','.join(map(_metavar, kinds))}; got {_shown(value)}")
    try:
        return tuple(_typed(kind, item, text) for kind, item in zip(kinds, items, strict=True))
    except ValueError as error:
        raise ValueError(f"{error} in {_shown(value)}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def change(config: T, values: Mapping[str, Any]) -> T:
    """The config with other values: by path, or nested as in a file. What is given of a dict is added to it."""
    settings = leaves(type(config))
    sections = [*{leaf.section: None for leaf in settings.values() if leaf.section}]
    chosen: dict[str, Any] = {path: functools.reduce(getattr, path.split("."), config) for path in settings}
    left = list(values.items())
    while left:
        path, value = left.pop(0)
        inside = (leaf.path for leaf in settings.values() if leaf.open and path.startswith(f"{leaf.path}."))
        if (table := next(inside, None)) is not None:
            chosen[table] = {**chosen[table], path.removeprefix(f"{table}."): value}
        elif path in settings and settings[path].open and isinstance(value, Mapping):
            chosen[path] = {**chosen[path], **value}
        elif path in settings:
            chosen[path] = os.fspath(value) if isinstance(value, os.PathLike) else value
        elif path in sections and isinstance(value, Mapping):
            left[:0] = [(f"{path}.{name}", inner) for name, inner in value.items()]
        elif path in sections:
            raise ValueError(f"{path} must be a section of settings by name; got {_shown(value)}")
        else:
            near = _nearest(path, [*settings, *sections])
            raise ValueError(f"unknown setting {path!r}" + (f"; did you mean {near!r}?" if near else ""))
    return build(type(config), flags=chosen)


# ---- YAML ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """1e-3 is a number, as in YAML 1.2; a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Text that _Loader would take for a number in quotes, tuples on one line, nothing shared by anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{FLOAT.pattern})$"), list("-+0123456789."))
_BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks to YAML, but not to Python: only "quotes" keep them
_Dumper.add_representer(
    str, lambda d, x: d.represent_scalar("tag:yaml.org,2002:str", x, style='"' if _BREAKS.search(x) else None)
)
_Dumper.add_representer(tuple, lambda d, x: d.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True))


def to_yaml(config: Any) -> str:
    """Every value, in the order of the fields, an empty line before each section. build() reads it back exactly."""
    parts = []
    for name, value in _tree(config).items():
        part = yaml.dump({name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
        parts.append(f"\n{part}" if is_dataclass(getattr(config, name)) else part)
    return "".join(parts)


def _tree(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name: _tree(value) if is_dataclass(value) else value for name, value in values.items()}


def _scalar(value: str) -> Any:
    """Text as YAML reads it."""
    try:
        return yaml.load(value, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"must be a YAML value; got {_shown(value)}") from None


def _read(file: Path) -> Any:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context or 'broken YAML'}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character {error.position + 1}: {error.reason}") from None


def _flatten(data: Any, known: Mapping[str, Leaf], sections: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every key of the file."""
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"must hold settings by name (key: value); got a {type(data).__name__}")
    left = [(str(key), value) for key, value in (data or {}).items()]
    while left:
        path, value = left.pop(0)
        if path in known or _opened(path, known):
            yield path, value
        elif path not in sections:
            near = _nearest(path, [*known, *sections])
            raise ValueError(f"unknown key {path!r}" + (f"; did you mean {near!r}?" if near else _names(path, known)))
        elif isinstance(value, dict):
            left = [(f"{path}.{key}", v) for key, v in value.items()] + left
        elif value is not None:
            raise ValueError(f"{path} must be a section of settings by name; got {_shown(value)}")


def _names(path: str, known: Mapping[str, Leaf]) -> str:
    section = path.rpartition(".")[0]
    names = [leaf.path for leaf in known.values() if leaf.section == section]
    return f"; known: {', '.join(names)}" if names else ""


def _unknown_flag(flag: str, known: Sequence[str]) -> str:
    near = _nearest(flag, known)
    return f"unknown option {flag}" + (f"; did you mean {near}?" if near else "")


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """temperature or rolout.temperature -> rollout.temperature by the last part; else among its section's."""
    section, _, last = name.lstrip("-").rpartition(".")
    parts = [(path, *path.lstrip("-").rpartition(".")[::2]) for path in known]
    same = [(path, where) for path, where, what in parts if what == last]
    if same:
        near = difflib.get_close_matches(section, [where for _, where in same], n=1)
        return next((path for path, where in same if near and where == near[0]), same[0][0])
    beside = {what: path for path, where, what in parts if where == section}
    if beside:
        return next((beside[what] for what in difflib.get_close_matches(last, beside, n=1)), None)
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
