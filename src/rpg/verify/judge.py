"""Is the final answer of a response the true one?

First without evaluating anything: text, exact rational numbers, and structures of these, in linear time and in this
process. Only what that cannot decide (surds, polynomials, equations) goes to sympy: in a worker process with limits of
time and memory, which is started when first needed; or right here if this is such a process already.

``lenient`` asks math-verify instead, for evaluations that are compared with its figures.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..rewards import worker
from ..rewards.scoring import Scorer
from .answers import final_answer, marked_answer
from .compare import same
from .mathematics import by_math_verify, equal, load, refusal

LONG = 600  # characters; below the least limit that Python can have on the digits of an int
SECONDS = 2.0  # for one comparison
HARD = 4.0  # for a worker that a call in C keeps from looking at the clock
MEMORY_GB = 1.0
PLAIN = re.compile(r"([-+]?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.([0-9]*))?")
LENIENT = "lenient"
EQUAL, DIFFERENT, UNKNOWN, LATE = 1.0, 0.0, -1.0, -2.0


class Verdict(NamedTuple):
    right: bool
    reason: str  # in a few words

    @property
    def gave_up(self) -> bool:
        """Wrong for want of time or memory rather than known to be; such verdicts are not remembered."""
        return self.reason.startswith("gave up")


class _GaveUp(Exception):
    """Passes by the cache."""


def verify(response: str, truth: str, lenient: bool = False) -> bool:
    r"""True if the final answer of the response equals the truth. Never raises, whatever the two are.

    Where the final answer is: answers.py. The truth may be written as one, too (``… #### 42``, ``\boxed{42}``).
    ``lenient``: math-verify's verdict on the whole response, whatever the rules here say.
    """
    return verdict(response, truth, lenient).right


def verify_reward(response: str, answer: str, prompt: str) -> float:
    """1 where the response's final answer is right."""
    return float(verify(response, answer))


def lenient_reward(response: str, answer: str, prompt: str) -> float:
    """1 where math-verify takes the response for right."""
    return float(verify(response, answer, lenient=True))


def verdict(response: str, truth: str, lenient: bool = False) -> Verdict:
    """The same with a reason: "same number", "no final answer", "gave up after 2 s", …"""
    if not isinstance(response, str) or not isinstance(truth, str):
        return Verdict(False, "not text")
    marked = marked_answer(truth)
    wanted = (truth if marked is None else marked[1]).strip()
    try:
        return judged_leniently(response, wanted) if lenient else judged_strictly(response, wanted)
    except _GaveUp as error:
        return Verdict(False, f"gave up {error}")
    except Exception as error:  # no worker can be had, say: that is not the answer's fault, and not remembered
        text = f"could not be worked out: {type(error).__name__}: {error}"
        with contextlib.suppress(Warning):  # even where warnings are errors
            warnings.warn(f"verify: {text}; such answers count as wrong", RuntimeWarning, stacklevel=2)
        return Verdict(False, text)


def judged_leniently(response: str, wanted: str) -> Verdict:
    outcome = worked_out(response, wanted, LENIENT)
    if outcome == LATE:
        raise _GaveUp(f"after {SECONDS:g} s")
    return Verdict(outcome == EQUAL, "equal for math-verify" if outcome == EQUAL else "different for math-verify")


def judged_strictly(response: str, wanted: str) -> Verdict:
    given = final_answer(response)
    if given is None:
        return Verdict(False, "no final answer")
    given = given.strip()
    if not wanted.strip(".$"):
        return Verdict(False, "the truth is empty")
    if not given.strip(".$ "):
        return Verdict(False, "empty answer")
    if given == wanted:
        return Verdict(True, "same text")
    if len(given) > LONG or len(wanted) > LONG:
        return Verdict(False, f"different, and longer than {LONG} characters")
    x, y = plain_number(given), plain_number(wanted)
    if x is not None and y is not None:
        return Verdict(x == y, "same number" if x == y else "another number")
    if not (legible(given) and legible(wanted)):
        return Verdict(False, "different, with characters that cannot be seen")
    return judged(given, wanted)


def plain_number(text: str) -> Fraction | int | None:
    """Of 12, -1,234.50, \\$5: most answers there are, and so the short way."""
    match = PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, part = match.groups()
    digits = whole.replace(",", "")
    value = int(digits) if not part else Fraction(int(digits + part), 10 ** len(part))
    return -value if sign == "-" else value


def legible(text: str) -> bool:
    """No control characters, no marks that turn the writing around, no halves of characters, nothing of private use."""
    return (text.isascii() and (text.isprintable() or "".join(text.split()).isprintable())) or not any(
        (not c.isprintable() and not c.isspace() and c not in "\u200b\u2060\ufeff") or "\ue000" <= c <= "\uf8ff"
        for c in text
    )


@lru_cache(maxsize=16384)
def judged(given: str, wanted: str) -> Verdict:
    try:
        equals = same(given, wanted)
    except RecursionError:
        return Verdict(False, "nested too deeply")
    if equals is not None:
        return Verdict(equals, "equal" if equals else "different")
    for text in (given, wanted):
        if why := refusal(text):
            return Verdict(False, f"different as text, and not worked out: {why}")
    outcome = worked_out(given, wanted)
    if outcome == LATE:
        raise _GaveUp(f"after {SECONDS:g} s")
    if outcome == UNKNOWN:
        return Verdict(False, "different as text, and not understood")
    return Verdict(outcome == EQUAL, "equal, worked out" if outcome == EQUAL else "different, worked out")


# ---- in a worker -----------------------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """Not an Exception: sympy catches those."""


def worked_out(given: str, wanted: str, by: str = "") -> float:
    return compared(given, wanted, by) if worker.inside_worker else _ask(given, wanted, by)


def compared(given: str, wanted: str, by: str = "") -> float:
    """In a process that something else ends if this does not return."""
    load()
    try:
        with _limited(SECONDS):
            equals = by_math_verify(given, wanted) if by == LENIENT else equal(given, wanted)
    except _TimeUp:
        return LATE
    except (MemoryError, RecursionError):
        import sympy  # type: ignore[import-untyped]

        sympy.core.cache.clear_cache()
        return LATE
    except Exception:  # sympy raises what it likes at what it cannot compare
        return UNKNOWN
    return UNKNOWN if equals is None else EQUAL if equals else DIFFERENT


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """By a signal, again and again until it is heard; outside the main thread there is none."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.25)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), interval)


# ---- this process's own worker ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_scorer: Scorer | None = None


def _ask(given: str, wanted: str, by: str = "") -> float:
    global _scorer
    with _lock:
        if _scorer is None or not _scorer._finalizer.alive:  # closed by an exit handler that came before this call
            _scorer = Scorer(compared, workers=1, timeout=HARD, memory_gb=MEMORY_GB, on_error=LATE)
    for _ in range(2):  # a worker may be killed for what others have done: once more
        scores = _scorer.score([(given, wanted, by)])
        if not scores.failures["raised"]:
            return float(scores.values[0])
    raise _GaveUp(f"as the worker died twice ({scores.messages[0]})")


def _forget() -> None:
    """A fork has no worker of its own yet; the one it sees is its parent's."""
    global _lock, _scorer
    _lock, _scorer = threading.Lock(), None


worker.preloads.append(load)  # sympy: a second, which no answer should pay for
os.register_at_fork(after_in_child=_forget)
