"""Problems from .jsonl, .json and .parquet files, with the column names that datasets of this field use."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from ...console import describe
from ...verify.answers import boxed
from ..overlap import word_list
from ..task import Problem

SUFFIXES = (".jsonl", ".json", ".parquet")
PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "final_answer", "solution", "ground_truth", "target", "reward_model.ground_truth")  # last: verl
LEVELS = ("level", "difficulty")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*+(?!\{)([^\s$]*+)")
LONG = 200  # characters: a solution without a box that is longer is no answer but a text

Rows = Iterable[tuple[str, Any]]  # (where it stands, row)


@dataclass(frozen=True)
class Columns:
    """Of the prompt and the answer, where they are not the usual ones; one with a dot goes into nested objects.

    Unless ``strict``, rows without these may have the usual ones.
    """

    prompt: str | None = None
    answer: str | None = None
    strict: bool = True


USUAL = Columns()


def load_file(path: str | Path, columns: Columns = USUAL) -> tuple[list[Problem], int]:
    """(problems, rows left out for want of an answer)

    One problem a row. GSM8K's ``… #### 42`` is cut to 42, and a solution to what is in its last \\boxed{…}.
    """
    path = Path(path).expanduser()
    problems, lacking = problems_of(rows_of(path), columns)
    if not problems:
        raise ValueError(lacking[0] if lacking else f"{path} is empty")
    return problems, len(lacking)


def problems_of(rows: Rows, columns: Columns = USUAL) -> tuple[list[Problem], list[str]]:
    """(problems, a line for each row that is left out: its answer is null or empty)"""
    prompts, answers = (
        usual if name is None else (name,) if columns.strict else (name, *usual)
        for name, usual in ((columns.prompt, PROMPTS), (columns.answer, ANSWERS))
    )
    problems, lacking = [], []
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row must be an object; got {_kind(row)}")
        prompt, system = _prompt(where, _find(where, row, "prompt", prompts)[1])
        if not prompt.strip():
            raise ValueError(f"{where}: its prompt is empty")
        column, value = _find(where, row, "answer", answers)
        answer = _answer(where, column, value)
        if answer:
            try:
                problems.append(Problem(prompt, answer, _level(row), system=system))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        else:
            lacking.append(f"{where}: its {column!r} is empty, as in all rows{_columns(row, 'answer')}")
    return problems, lacking


def split(problems: Sequence[Problem], test_share: float = 0.1) -> tuple[list[Problem], list[Problem]]:
    """(train, test) by a hash of the prompt: the same at any time and in any order, equal prompts on the same side.

    Neither side is left empty as long as there are two different prompts and a share strictly between 0 and 1.
    """
    if not 0 <= test_share <= 1:
        raise ValueError(f"test_share must be between 0 and 1; got {test_share}")
    places = [place_of(problem.prompt) for problem in problems]
    chosen = {place for place in places if place < test_share}
    if 0 < test_share < 1 and len(set(places)) > 1:
        chosen = (chosen or {min(places)}) - ({max(places)} if len(chosen) == len(set(places)) else set())
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, place in zip(problems, places, strict=True):
        sides[place in chosen].append(problem)
    return sides


def place_of(prompt: str) -> float:
    """In [0, 1), the same for what overlap.py calls the same problem."""
    text = " ".join(word_list(prompt) or prompt.split()).encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 11) / 2**53


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Number(str):
    """A number as the file writes it: 0.10 stays 0.10, and a long integer keeps its digits."""


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, or file: row n of a list; row)"""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"cannot read {path}: the name must end in .jsonl, .json or .parquet")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no such file: {path}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix == ".parquet":
        yield from _parquet(path, data)
        return
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


def _parquet(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_batches()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path}: {describe(error)}") from None
    yield from arrow_rows(str(path), batches)


def arrow_rows(name: str, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The rows of pyarrow's record batches."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{name}: row {number}", row


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


# ---- columns ---------------------------------------------------------------------------------------------------------


def _find(where: str, row: dict[str, Any], what: str, names: Sequence[str]) -> tuple[str, Any]:
    """(column, value) of the first that has something in it; "" where those that are there have nothing."""
    there = {name: value for name in names if (value := _value(row, name)) is not None}
    for name, value in there.items():
        if not isinstance(value, str) or value.strip():
            return name, value
    if there:
        return next(iter(there)), ""
    wanted = repr(names[0]) if len(names) == 1 else f"{what} ({', '.join(names)})"
    raise ValueError(f"{where}: no {wanted}{_columns(row, what)}")


def _value(row: dict[str, Any], name: str) -> Any:
    """ "" of null, None where there is no such column."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if value is None:  # an object that is null has nothing in it
            break
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return "" if value is None else value


def _columns(row: dict[str, Any], what: str) -> str:
    keys = ", ".join(repr(k)[:40] for k in list(row)[:20]) or "none"
    return f"; its columns: {keys} (task.{what}_key names one)"


def _prompt(where: str, value: Any) -> tuple[str, str]:
    """(prompt, system prompt) of a text or of a conversation."""
    if not isinstance(value, list):
        return _text(where, "prompt", value), ""
    messages = [m if isinstance(m, dict) else {} for m in value]
    roles = [str(m.get("role")) for m in messages]
    if "user" not in roles:
        raise ValueError(f"{where}: its prompt is a list without a message of role 'user'")
    if roles not in (["user"], ["system", "user"]):
        wanted = "one message of the user, after a system prompt or not"
        raise ValueError(f"{where}: its prompt must be {wanted}; got {', '.join(roles[:6])}")
    texts = [_text(where, "prompt", m.get("content")) for m in messages]
    return texts[-1], texts[0] if len(texts) > 1 else ""


def _answer(where: str, column: str, value: Any) -> str:
    if column == "final_answer" and isinstance(value, list):  # OlympiadBench: all of them are the answer
        return ", ".join(_text(where, "answer", part) for part in value)
    text = _text(where, "answer", value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    box = last_box(text)
    if box is not None:
        return box
    if column == "solution" and len(text) > LONG:
        raise ValueError(f"{where}: its solution has no \\boxed{{…}}: name the answer's column with task.answer_key")
    return text.strip()


def last_box(text: str) -> str | None:
    """What is in the last \\boxed{…}, or stands behind a \\boxed without braces."""
    closed, bare = boxed(text), max(BARE_BOX.finditer(text), key=re.Match.start, default=None)
    if bare is not None and (closed is None or bare.start() > closed[0]):
        return bare[1].rstrip(".,") or None
    return None if closed is None else closed[1].strip()


def _level(row: dict[str, Any]) -> int:
    """3 of 3, "3", 3.0, 3.5 and "Level 3"; 0 where nothing like it is there."""
    value = next((row[name] for name in LEVELS if row.get(name) is not None), None)
    level = re.fullmatch(r"(?:level )?([0-9]{1,9})(?:\.[0-9]*)?", str(value).strip().lower())
    return int(level[1]) if level else 0


def _text(where: str, what: str, value: Any) -> str:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):  # of parquet
        return f"{Decimal(str(value)):f}"  # 1e16 with all its digits
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{where}: its {what} is bytes that are no UTF-8: write the column as text") from None
    if not isinstance(value, str):
        other = f" (task.{what}_key names another column)"
        raise ValueError(f"{where}: its {what} must be text or a number; got {_kind(value)}{other}")
    return str(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", _Number: "a number", str: "text", float: "NaN"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
