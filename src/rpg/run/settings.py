"""Nested frozen dataclasses from YAML and flags, and back. Knows no field by name; errors are one-line ValueErrors."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..console import nearest
from ..secrets import without_secrets

T = TypeVar("T")
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
KINDS = {str: "text (in quotes, if need be)", bool: "true or false", int: "a whole number", float: "a number"}
SHOWN = 60  # characters of a wrong value in a message
LARGEST = 2**63 - 1  # of whole numbers
_BROKEN = re.compile("[\ud800-\udfff]")  # what is left of bytes that are not UTF-8, or half a pair


class WrongValue(argparse.ArgumentTypeError, ValueError):
    """Says what a value must be; argparse shows the text as it is."""


@dataclass(frozen=True)
class Bound:
    """What a setting's number must be, as a part of its type: Annotated[int, Bound("positive", lambda x: x > 0)]."""

    text: str
    holds: Callable[[float], bool]


AUTO: Any = "auto"  # in place of a number, until it is known what is trained


class OrAuto:
    """Of a number that may be AUTO: Annotated[float, OrAuto()]. Whoever computes with it settles it first."""


@dataclass(frozen=True)
class Leaf:
    """One setting: ``rollout.temperature``."""

    path: str
    hint: Any  # its type, without the None
    optional: bool
    bounds: tuple[Bound, ...]
    default: Any
    doc: str
    or_auto: bool = False

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def open(self) -> bool:
        """Takes any key: a dict."""
        return get_origin(self.hint) is dict

    @property
    def flag(self) -> str:
        return f"--{self.path}"

    def convert(self, value: Any, text: bool) -> Any:
        """The value as its type, or a ValueError that says what it must be. Text, from a flag, is read first."""
        if self.optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
            return None
        if self.or_auto and isinstance(value, str):
            return AUTO if value.lower() == AUTO else _convert(self.hint, value, text, f" or {AUTO}")
        return _convert(self.hint, value, text)


def leaves(cls: type) -> Mapping[str, Leaf]:
    """Every setting by its path, in the order of the fields."""
    if cls not in _LEAVES:
        _LEAVES[cls] = {leaf.path: leaf for leaf in _leaves(cls, "")}
    return _LEAVES[cls]


_LEAVES: dict[type, Mapping[str, Leaf]] = {}


def _leaves(cls: type, prefix: str) -> Iterator[Leaf]:
    hints, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    docs = _docs(cls.__module__).get(cls.__name__, {})
    for f in fields(cls):
        hint = hints[f.name]
        if is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]
            continue
        optional = get_origin(hint) in (Union, types.UnionType)
        if optional:
            (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        default = f.default if f.default_factory is MISSING else f.default_factory()
        marks = tuple(_marks(annotated[f.name]))
        bounds, or_auto = tuple(m for m in marks if isinstance(m, Bound)), any(isinstance(m, OrAuto) for m in marks)
        yield Leaf(f"{prefix}{f.name}", hint, optional, bounds, default, docs.get(f.name, ""), or_auto)


def _marks(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    else:
        for part in get_args(hint):
            yield from _marks(part)


@functools.cache
def _docs(module: str) -> dict[str, dict[str, str]]:
    """By class, the string under each field, as one line; empty where there is no source, as in a frozen program."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    docs: dict[str, dict[str, str]] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line, below in itertools.pairwise(node.body):
            match line, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                    docs.setdefault(node.name, {})[name] = " ".join(text.split())
    return docs


def flat(config: Any) -> dict[str, Any]:
    """Every value by its path, the keys of a dict as paths of their own; no secrets: this is what is written."""
    values: dict[str, Any] = {}
    for path, leaf in leaves(type(config)).items():
        value = attrgetter(path)(config)
        inside = without_secrets(value) if leaf.open else {}
        values |= {f"{path}.{key}": v for key, v in inside.items()} if leaf.open else {path: value}
    return values


def options_of(config: Any) -> dict[str, dict[str, Any]]:
    """The settings that take any key, by path."""
    return {path: attrgetter(path)(config) for path, leaf in leaves(type(config)).items() if leaf.open}


def check_bounds(config: Any) -> None:
    """Refuse a number outside its setting's bounds, with one line that names the setting."""
    for path, leaf in leaves(type(config)).items():
        value = attrgetter(path)(config)
        none = value is None or (leaf.or_auto and value == AUTO)
        values = value if isinstance(value, tuple) else () if none else (value,)
        for bound in leaf.bounds:
            if not all(map(bound.holds, values)):
                raise ValueError(f"{path} must be {bound.text}; got {_cut(', '.join(map(str, values)))}")
        if isinstance(value, str) and not value.isascii() and _BROKEN.search(value):
            raise ValueError(f"{path} must be UTF-8 text; got {_cut(ascii(value))}")


# ---- flags -----------------------------------------------------------------------------------------------------------


def add_flags(
    parser: argparse.ArgumentParser, cls: type, only: Sequence[str] | None = None, unlisted: Sequence[str] = ()
) -> None:
    """A flag for each setting, grouped by section. Those not given leave nothing in the namespace: see given().

    ``only``: sections and settings that count for this command; a flag of another is refused as such. ``unlisted``:
    those that have a shorter name there, which the help lists instead.
    """
    group = functools.cache(parser.add_argument_group)
    counting = [leaf for leaf in leaves(cls).values() if only is None or {leaf.path, leaf.section} & set(only)]
    for leaf in counting:
        name = leaf.path if leaf.open else leaf.section
        _add_flag(group(name) if name else parser, leaf, listed=leaf.path not in unlisted)
    parser.allow_abbrev = False  # a mistyped flag is refused, not guessed
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is a value, not a flag
    parse, any_key = parser.parse_known_args, tuple(f"{leaf.flag}." for leaf in counting if leaf.open)

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """argparse cannot take flags whose names are not known beforehand (--loss.KEY)."""
        args = sys.argv[1:] if args is None else args
        given = {arg.partition("=")[0] for arg in args if arg.startswith(any_key)}
        for flag in given - set(parser._option_string_actions):
            parser.add_argument(flag, dest=flag[2:], default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return parse(args, namespace)

    parser.settings = cls  # type: ignore[attr-defined]  # for suggestions
    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _add_flag(group: Any, leaf: Leaf, listed: bool) -> None:
    text = leaf.doc if leaf.open else f"{leaf.doc} (default: {_written(leaf.default)})".strip()
    options: dict[str, Any] = {"dest": leaf.path, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    options |= {} if listed else {"help": argparse.SUPPRESS}
    if leaf.open:
        group.add_argument(f"{leaf.flag}.KEY", metavar="VALUE", **options)
        return
    options |= {"type": functools.partial(leaf.convert, text=True), "metavar": _metavar(leaf.hint, leaf.optional)}
    options |= {"metavar": f"{options['metavar']}|{AUTO}"} if leaf.or_auto else {}
    options |= {"nargs": "?", "const": True} if leaf.hint is bool else {}
    group.add_argument(leaf.flag, **options)


def _metavar(hint: Any, optional: bool = False) -> str:
    none = ["none"] if optional else []
    if get_origin(hint) is Literal:
        return "{" + ",".join([*map(str, get_args(hint)), *none]) + "}"
    if get_origin(hint) is tuple:
        return ",".join(map(_metavar, get_args(hint)))
    return "|".join(["true", "false", *none]) if hint is bool else {float: "X", int: "N"}.get(hint, "TEXT")


def _written(value: Any) -> str:
    """A default as one would write it behind the flag."""
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value) or "''"


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The settings among parsed arguments: what build() takes as flags."""
    return {path: value for path, value in vars(args).items() if _leaf_of(path, leaves(cls))}


def flags_of(config: Any) -> Iterator[tuple[str, str]]:
    """(--flag, text) of every setting that differs from its default; secrets are left out. build() reads it back."""
    usual = flat(type(config)())
    for path, value in flat(config).items():
        if path in usual and usual[path] == value:
            continue
        yield f"--{path}", _written_in(value) if path not in leaves(type(config)) else _written(value)


def _written_in(value: Any) -> str:
    """Of a dict, where text is read as YAML."""
    with contextlib.suppress(WrongValue):
        if isinstance(value, str) and _scalar(value) == value:
            return value
    return json.dumps(value, ensure_ascii=False)


# ---- from files and flags --------------------------------------------------------------------------------------------


def build(cls: type[T], *, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> T:
    """Flags over the file over the defaults. Flags: values by path, as text or already of their type."""
    values: dict[str, Any] = {}
    if file is not None:
        from ..yaml_text import read_yaml  # PyYAML is no part of the core

        try:
            _put(_flatten(read_yaml(file), cls), cls, values, text=False)
        except ValueError as error:
            raise ValueError(" ".join(f"{file}: {error}".split())) from None
    _put((flags or {}).items(), cls, values, text=True)
    return _make(cls, "", values)


def _put(pairs: Iterable[tuple[str, Any]], cls: type, values: dict[str, Any], text: bool) -> None:
    """Into values, converted; a dict's keys after the dict itself."""
    by_path = leaves(cls)
    for path, value in sorted(pairs, key=lambda pair: pair[0] not in by_path):
        leaf, read = _leaf_of(path, by_path), text and isinstance(value, str)
        if leaf is None:
            raise ValueError(unknown_flag(f"--{path}", [leaf.flag for leaf in by_path.values()], cls))
        try:
            if path in values and not text:
                raise ValueError("is given twice")
            if path in by_path:
                values[path] = leaf.convert(value, read)
            else:
                key = {path.removeprefix(f"{leaf.path}."): _scalar(value) if read else value}
                values[leaf.path] = values.get(leaf.path, leaf.default) | key
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None


def _make(cls: type[T], prefix: str, values: Mapping[str, Any]) -> T:
    chosen = {}
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            chosen[name] = _make(hint, f"{prefix}{name}.", values)  # type: ignore[arg-type]
        elif f"{prefix}{name}" in values:
            chosen[name] = values[f"{prefix}{name}"]
    return cls(**chosen)


def _leaf_of(path: str, by_path: Mapping[str, Leaf]) -> Leaf | None:
    """The setting of this path, or the dict that the path is a key of."""
    inside = (leaf for leaf in by_path.values() if leaf.open and path.startswith(f"{leaf.path}."))
    return by_path.get(path) or next(inside, None)


def _convert(hint: Any, value: Any, text: bool, more: str = "") -> Any:
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        by_text = {str(kind): kind for kind in kinds}
        if isinstance(value, (str, int)) and str(value) in by_text:
            return by_text[str(value)]
        near = nearest(str(value), list(by_text), cutoff=0.5)  # fp32 -> float32
        hint = f"; did you mean {near!r}?" if near else ""
        raise WrongValue(f"must be one of {', '.join(by_text)}; got {_shown(value)}{hint}")
    if get_origin(hint) is tuple:
        items = value.split(",") if isinstance(value, str) and text else value
        if not isinstance(items, (list, tuple)) or len(items) != len(kinds):
            raise WrongValue(f"must be {len(kinds)} values, {_metavar(hint)}; got {_shown(value)}")
        try:
            return tuple(_convert(kind, item, text) for kind, item in zip(kinds, items, strict=True))
        except ValueError as error:
            raise WrongValue(f"{error} in {_shown(value)}") from None
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise WrongValue(f"must be settings by name; got {_shown(value)}")
        return dict(value)
    if hint is bool and text:
        value = SWITCH.get(value.lower(), value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if hint in (int, float) and (text or hint is float or not isinstance(value, str)):
        with contextlib.suppress(ValueError, OverflowError):  # infinity has no int, the largest ints no float
            number = _number(value)
            if hint is float and not math.isnan(number):
                return float(number)
            if hint is int and number == int(number) and abs(number) <= LARGEST:
                return int(number)
    by_name = ": a function by its name, file.py:name, as it runs in processes of its own" if callable(value) else ""
    raise WrongValue(f"must be {KINDS[hint]}{more}{by_name}; got {_shown(value)}")


def _number(value: Any) -> int | float:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    return value


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
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
            if elsewhere := _elsewhere(path, type(config)):
                raise ValueError(f"unknown setting {path!r}: {elsewhere}")
            near = _nearest(path, [*settings, *sections], type(config))
            raise ValueError(f"unknown setting {path!r}" + (f"; did you mean {near!r}?" if near else ""))
    return build(type(config), flags=chosen)


# ---- YAML ------------------------------------------------------------------------------------------------------------


def to_yaml(config: Any) -> str:
    """Every value, in the order of the fields, an empty line before each section. build() reads it back exactly, but
    for secrets, which are left out."""
    from ..yaml_text import dump_yaml

    text = ""
    for name, value in _written_values(config).items():
        text += "\n" if is_dataclass(getattr(config, name)) else ""
        text += dump_yaml({name: value})
    return text


def _written_values(config: Any) -> dict[str, Any]:
    def written(value: Any) -> Any:
        return _written_values(value) if is_dataclass(value) else without_secrets(value)

    return {f.name: written(getattr(config, f.name)) for f in fields(config)}


def _scalar(value: str) -> Any:
    """Text as YAML reads it."""
    import yaml

    from ..yaml_text import load_yaml

    try:
        return load_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise WrongValue(f"must be a YAML value; got {_shown(value)}") from None


def _flatten(data: dict[Any, Any], cls: type, section: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every key of the file."""
    by_path = leaves(cls)
    for key, value in data.items():
        path = f"{section}.{key}" if section else str(key)
        if _leaf_of(path, by_path):
            yield path, value
        elif any(name.startswith(f"{path}.") for name in by_path):
            if not isinstance(value, dict | None):
                raise ValueError(f"{path} must be a section of settings by name; got {_shown(value)}")
            yield from _flatten(value or {}, cls, path)
        else:
            near = _nearest(path, [*by_path, *(leaf.section for leaf in by_path.values() if leaf.section)], cls)
            beside = ", ".join(leaf.path for leaf in by_path.values() if leaf.section == path.rpartition(".")[0])
            hint = f"; did you mean {near!r}?" if near else f"; known: {beside}" if beside else ""
            raise ValueError(f"unknown key {path!r}{hint}")


def unknown_flag(flag: str, options: Iterable[str], cls: type | None = None) -> str:
    if cls is not None and _leaf_of(flag[2:], leaves(cls)) is not None:
        return f"{flag} has no effect here: leave it out"
    if elsewhere := _elsewhere(flag[2:], cls):
        return f"unknown option {flag}: {elsewhere}"
    near = _nearest(flag[2:], _long(options), cls)
    return f"unknown option {flag}" + (f"; did you mean --{near}?" if near else "")


def unknown_argument(given: str, options: Iterable[str], cls: type | None = None) -> str:
    """What is no flag, but was perhaps meant as one: -n, steps=5"""
    names, (name, equals, value) = _long(options), given.lstrip("-").partition("=")
    if given.startswith("-") and len(name) == 1 and name not in names:
        starting = [option for option in names if option.startswith(name) and "." not in option]
        near = starting[0] if len(starting) == 1 else None if starting else _nearest(name, names, cls)
    elif given.startswith("-") or equals:
        open_to = any(option.endswith(".KEY") and name.startswith(option.removesuffix("KEY")) for option in names)
        near = name if name in names or open_to else _nearest(name, names, cls)
    else:
        near = None
    what = "unknown option" if given.startswith("-") else "unrecognized argument"
    flag = f"--{near} {value}".rstrip()
    return f"{what} {given}" + (f"; did you mean {flag}?" if near else "")


def _long(options: Iterable[str]) -> list[str]:
    return [option[2:] for option in options if option.startswith("--")]


def _elsewhere(name: str, cls: type | None) -> str | None:
    """What stands in for something that others set and we do not."""
    texts: Mapping[str, str] = getattr(cls, "not_set", {})
    return texts.get(name.replace("-", "_").lower().rpartition(".")[2])


def _nearest(name: str, paths: Sequence[str], cls: type | None) -> str | None:
    """temperature or rolout.temperature -> rollout.temperature by the last part; learning_rate -> optim.lr by what
    others call it; else what is spelled nearly so in its section, or anywhere."""
    section, _, last = name.replace("-", "_").lower().rpartition(".")
    ends = [(path, *path.rpartition(".")[::2]) for path in paths]
    called = (path for path, others in getattr(cls, "other_names", {}).items() if last in others.split())
    known = next((path for path in called if path in paths or _leaf_of(path, leaves(cls))), None)  # type: ignore[arg-type]
    if known and not section:
        return str(known)
    if same := {where: path for path, where, end in reversed(ends) if end == last}:
        near = nearest(section, same)
        return same[near] if near else list(same.values())[-1]
    if known:
        return str(known)
    beside = {end: path for path, where, end in ends if where == section}
    anywhere = {end: path for path, _, end in reversed(ends)}
    whole = {} if beside else {path: path for path in paths}
    for spelled, among in ((last, beside), (last, anywhere), (name, whole)):
        if near := nearest(spelled, among):
            return among[near]
    return None
