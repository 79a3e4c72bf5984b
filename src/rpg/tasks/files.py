"""Problems from .jsonl and .json files, with the key names that datasets of this field use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .importing import describe
from .task import Problem

PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution", "ground_truth", "target", "reward_model.ground_truth")  # the last is verl's


def load_file(path: str | Path, *, prompt_key: str | None = None, answer_key: str | None = None) -> list[Problem]:
    """One problem a row. A key with a dot in it goes into nested objects. GSM8K's ``… #### 42`` is cut to 42."""
    path = Path(path)
    problems = []
    for where, row in _rows(path):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row must be an object; got {_kind(row)}")
        prompt = _prompt(where, _find(where, row, "prompt", prompt_key, PROMPTS))
        answer = _text(where, "answer", _find(where, row, "answer", answer_key, ANSWERS))
        answer = answer.rpartition("####")[2].strip()
        for name, text in (("prompt", prompt), ("answer", answer)):
            if not text.strip():
                raise ValueError(f"{where}: its {name} is empty")
        level = row.get("level")
        problems.append(Problem(prompt, answer, int(level) if isinstance(level, _Number) and level.isdecimal() else 0))
    if not problems:
        raise ValueError(f"{path} is empty")
    return problems


def split(problems: Sequence[Problem], test_share: float = 0.1) -> tuple[list[Problem], list[Problem]]:
    """(train, test) by a hash of the prompt: the same at any time and in any order, equal prompts on the same side.

    Neither side is left empty as long as there are two different prompts and a share strictly between 0 and 1.
    """
    if not 0 <= test_share <= 1:
        raise ValueError(f"test_share must be between 0 and 1; got {test_share}")
    places = [_place(problem.prompt) for problem in problems]
    chosen = {place for place in places if place < test_share}
    if 0 < test_share < 1 and len(set(places)) > 1:
        chosen = (chosen or {min(places)}) - ({max(places)} if len(chosen) == len(set(places)) else set())
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, place in zip(problems, places, strict=True):
        sides[place in chosen].append(problem)
    return sides


def _place(prompt: str) -> float:
    """In [0, 1), blind to spacing."""
    text = " ".join(prompt.split()).encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 11) / 2**53


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Number(str):
    """A number as the file writes it: 0.10 stays 0.10, and a long integer keeps its digits."""


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, or file: row n of a list; row)"""
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"cannot read {path}: the name must end in .jsonl or .json")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no such file: {path}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    data = data.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark
    if path.suffix == ".jsonl":
        for number, line in enumerate(data.split(b"\n"), 1):  # a str would be cut at U+2028 as well
            if line.strip():
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    elif data.strip():
        rows = _parse(data, str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path} must hold a list of rows; got {_kind(rows)}")
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _parse(data: bytes, where: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(data.decode("utf-8"), parse_int=_Number, parse_float=_Number, parse_constant=refuse)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{where}: malformed JSON: {error.msg} ({place})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise ValueError(f"{where}: malformed JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: malformed JSON: {describe(error).removeprefix('ValueError: ')}") from None


def _find(where: str, row: dict[str, Any], what: str, key: str | None, known: Sequence[str]) -> Any:
    for name in (key,) if key is not None else known:
        value = row.get(name)
        if value is None and "." in name:
            value = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    wanted = repr(key) if key is not None else f"{what} ({', '.join(known)})"
    keys = ", ".join(repr(k)[:40] for k in list(row)[:20]) or "none"
    raise ValueError(f"{where}: no {wanted}; its keys: {keys}")


def _prompt(where: str, value: Any) -> str:
    """Text, or the last message of the user in a conversation."""
    if isinstance(value, list):
        asked = [m.get("content") for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if not asked:
            raise ValueError(f"{where}: its prompt is a list without a message of role 'user'")
        value = asked[-1]
    return _text(where, "prompt", value)


def _text(where: str, what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: its {what} must be text or a number; got {_kind(value)}")
    return str(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", _Number: "a number", str: "text"}
    return names.get(type(value), "null")
