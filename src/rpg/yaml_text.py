"""YAML: read with care, and written so that it is read back exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

NODES = 20_000  # values of a file, with aliases unfolded


class _Loader(yaml.SafeLoader):
    """1e-3 is a number, as in YAML 1.2; a key given twice is an error, and so are aliases that unfold without end."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _unfolded(node, {})
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _unfolded(node: Any, sizes: dict[int, int]) -> int:
    """Values under a node, those of its aliases as often as they are named."""
    if id(node) not in sizes:
        sizes[id(node)] = NODES  # if it comes again while it is counted, it contains itself
        inner = (child for item in node.value for child in (item if isinstance(item, tuple) else (item,)))
        many = () if isinstance(node, yaml.ScalarNode) else inner
        sizes[id(node)] = 1 + sum(_unfolded(child, sizes) for child in many)
        if sizes[id(node)] > NODES:
            raise yaml.constructor.ConstructorError(None, None, f"more than {NODES:,} values", node.start_mark)
    return sizes[id(node)]


def load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


class _Dumper(yaml.SafeDumper):
    """Text that _Loader would take for a number in quotes, tuples on one line."""


_FLOAT = re.compile(r"^[-+]?(?:(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*)$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks to YAML, but not to Python: only "quotes" keep them
_Dumper.add_representer(
    str, lambda d, x: d.represent_scalar("tag:yaml.org,2002:str", x, style='"' if _BREAKS.search(x) else None)
)
_Dumper.add_representer(tuple, lambda d, x: d.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True))


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


def read_yaml(file: Path) -> dict[Any, Any]:
    """A file of settings by name; a ValueError of one line where it is none."""
    try:
        data = load_yaml(file.read_text(encoding="utf-8"))
        if isinstance(data, dict | None):
            return data or {}
        problem = f"must hold settings by name (key: value); got a {type(data).__name__}"
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        problem = f"{where}{error.problem or error.context or 'broken YAML'}"
    except RecursionError:
        problem = "is nested too deeply"
    except yaml.reader.ReaderError as error:
        problem = f"character {error.position + 1}: {error.reason}"
    raise ValueError(problem)
