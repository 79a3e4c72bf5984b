r"""How fast and how strict rpg.tasks.verify is, beside math-verify and TRL's accuracy_reward, in one run.

    python benchmarks/verification.py [--items 2000] [--workers 2]
    python benchmarks/verification.py --pairs
    python benchmarks/verification.py --fuzz 10000 [--seed 0]
    python benchmarks/verification.py --gold math500.jsonl [gsm8k-test.jsonl …]

Every item is a different response, so that no cache of verdicts helps; truths repeat, as they do in training (eight
responses a truth). "math-verify" is verify(parse(truth), parse(response)) with its own time limits, as its README has
it; "TRL" is trl.rewards.accuracy_reward of the TRL installed (the extra audit). The last table takes the
pairs of tests/verify/pairs, each judged by hand: where the three differ from that judgement. --fuzz verifies random
answers made of fragments of LaTeX, of mutations of true answers and of hostile ones: none may hang, raise or kill.
--gold takes the answers of datasets: each must equal itself and itself in another hand, and must not equal its
neighbours: a number one more or less, another sign, coordinates exchanged, a number with its arithmetic undone.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from rpg.rewards import worker
from rpg.tasks import Scorer, verify
from rpg.tasks.sources.files import load_file
from rpg.verify.judge import verdict

PAIRS = Path(__file__).parents[1] / "tests" / "verify" / "pairs"
Item = tuple[str, str, bool]  # response, truth, is it right
SAMPLES = 8  # responses a truth
ROUNDS = 3  # the best counts: others may be using the machine

LATEX = r"""
\frac \frac{1}{2} \sqrt{ \sqrt ^{ _{ \left( \right) \{ \} \pi \infty \pm \mp \cup \cdot \times \text{cm} \text{ \mathrm{
\begin{pmatrix} \end{pmatrix} \\ \boxed{ \le \ge \ne \in \approx \sin \log_2 \ln \binom{9}{3} \sum_{k=1}^{ \int_0^1
\lim_{x\to0} \overline{3} \circ \% \$ \! 1,234 10^{10} 9^{9 99! e^{i\pi} 0.\overline{9} #### </think> <answer> ４２ 答案
"""
FRAGMENTS = [
    *LATEX.split(),
    *"0123456789xyzabein+-*/^_=<>(){}[]|,;:.!%$&~'\" \n\t",
    *"\u202e\u200b\x00\ud800\U0001d7d8\ue000½²−√∞π≤é",
    *(" or ", " and ", "answer is "),
]
SHORT = r"""
9^{9^{9^9}} 10^{10!} 10^{10}! 9999! (9999!)! (x+y)^{9999} ((9^{99})^{99})^{99} (a+b+c+d)^{60} e^{e^{e^{e^{79}}}}
\Gamma(10^{9}) (1+10^{-9999})^{9999} \sum_{k=1}^{10^9}\frac{1}{k} \int_0^1x^xdx \prod_{k=1}^{10^9}k \sin(10^{4000})
\lfloor10^{4000}\pi\rfloor \cos(\frac{\pi}{65537}) \binom{9999}{4999} \gcd(10^{999},10^{888}) x^{x^{x^{x^{x}}}}
\frac{(x+1)^{300}-(x-1)^{300}}{(x+2)^{300}}
"""
HOSTILE = [
    *SHORT.split(),
    *(
        word * 100
        for word in ("\\frac{", "\\sqrt{", "\\left(", "\\{", "\\begin{pmatrix}", "\\pm x", "x=", "x<", "x or ")
    ),
    *("\u202e42", "4\x002", "\ud8002", "\\frac{" * 90 + "1" + "}{2}" * 90, "\\{" * 100 + "\\}" * 100),
    *("1" * 10**6, "x" * 10**5, "{" * 50_000 + "}" * 50_000),
    "+".join(f"\\sqrt{{{i}}}" for i in range(2, 40)),
    ",".join(f"\\sqrt{{{i}}}" for i in range(50)),
    *(
        "1+" * 190 + "\\pi",
        "+".join(["\\pi"] * 100),
        "2\\cdot " * 45 + "\\pi",
        "(1+\\sqrt{2})" * 25,
        "2 " + "million " * 70,
    ),
    *("\\binom{" * 12 + "9" + "}{2}" * 12, "\\sqrt{2+" * 12 + "\\pi" + "}" * 12, "\\boxed{" * 50_000 + "}" * 50_000),
]
TRUTHS = [
    "42",
    "\\frac{3}{4}",
    "\\sqrt{2}",
    "x^2+1",
    "(1,\\sqrt{2})",
    "y=2x+1",
    "[0,\\pi)",
    "\\{1,\\sqrt{3}\\}",
    "\\text{(B)}",
]


# ---- items -----------------------------------------------------------------------------------------------------------


def gsm8k(rng: random.Random, count: int) -> Iterator[Item]:
    """Whole numbers and money at the end of a few sentences."""
    for i in range(count):
        truth = rng.randint(1, 20000) if i % SAMPLES == 0 else truth  # noqa: F821
        right = rng.random() < 0.5
        given = truth if right else truth + rng.choice([-10, -1, 1, 7, 100])
        text = rng.choice([f"{given}", f"{given:,}", f"\\${given}", f"{given}.00", f"{given} dollars"])
        form = rng.choice(["#### {}", "\\boxed{{{}}}", "The answer is {}.", "Answer: {}"])
        yield f"Step {i}: we add, then multiply, and find it.\n" * 3 + form.format(text), str(truth), right


def mathematics(rng: random.Random, count: int) -> Iterator[Item]:
    """Surds, fractions, polynomials, points, intervals and equations, each written in another way than the truth."""
    for i in range(count):
        if i % SAMPLES == 0:
            a, b, c, kind = rng.randint(2, 30), rng.choice([2, 3, 5, 6, 7]), rng.randint(1, 40), rng.randrange(6)
        right = rng.random() < 0.5
        d = b if right else b + 1
        n = f"{i}"  # a different response each time
        truth, given = [
            (f"{a}\\sqrt{{{b}}}+{c}", f"{c}+\\frac{{{a * d}}}{{\\sqrt{{{b}}}}}"),
            (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{3 * a}}}{{{3 * d}}}"),
            (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{d})"),
            (f"({a}, \\frac{{\\pi}}{{{b}}})", f"\\left({a},\\frac{{1}}{{{d}}}\\pi\\right)"),
            (f"[{c},\\sqrt{{{a * a * b}}})", f"{c} \\le x < {a}\\sqrt{{{d}}}"),
            (f"y = {a}x - {b}", f"{a}x - y - {d} = 0"),
        ][kind]  # fmt: skip
        yield f"Attempt {n}: it follows that $\\boxed{{{given}}}$.", truth, right


def hostile(rng: random.Random, count: int) -> Iterator[Item]:
    for i in range(count):
        yield f"Attempt {i}: $\\boxed{{{HOSTILE[i % len(HOSTILE)]}}}$", rng.choice(TRUTHS), False


def fuzzed(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """(response, truth)"""
    rng = random.Random(seed)
    known = [pair[1] for pair in judged()] + TRUTHS
    forms = ["\\boxed{{{}}}"] * 6 + ["#### {}", "Answer: {}", "<answer>{}</answer>", "The answer is {}.", "{}"]
    for _ in range(count):
        truth = rng.choice(known)
        kind = rng.random()
        if kind < 0.4:
            given = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 25)))
        elif kind < 0.8:
            given = mutated(rng, rng.choice(known) if rng.random() < 0.5 else truth)
        elif kind < 0.95:
            given = "".join(
                chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3000)])) for _ in range(rng.randint(1, 60))
            )
        else:
            given = mutated(rng, rng.choice([h for h in HOSTILE if len(h) < 2000]))
        if rng.random() < 0.1:
            truth = mutated(rng, truth)
        yield rng.choice(forms).replace("{{", "{").replace("}}", "}").replace("{}", given, 1), truth


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        piece = rng.choice(["", rng.choice(FRAGMENTS), text[at:end] * rng.randint(1, 3), "{" + text[at:end] + "}"])
        text = text[:at] + piece + text[end if rng.random() < 0.5 else at :]
    return text


def judged() -> Iterator[tuple[str, str, bool, str]]:
    """The pairs that were judged by hand: response, truth, is it right, why."""
    for name, form in (("answers", "\\boxed{{{}}}"), ("responses", "{}")):
        for rows in yaml.safe_load((PAIRS / f"{name}.yaml").read_text(encoding="utf-8")).values():
            for given, truth, right, why in rows:
                yield (f"\\boxed{{{given}}}" if "boxed" in form else given), truth, right == "right", why


def gold(paths: list[str]) -> list[str]:
    """The different answers of these files."""
    return sorted({p.answer.strip() for path in paths for p in load_file(path)[0] if p.answer.strip()})


def in_another_hand(truth: str) -> Iterator[str]:
    yield truth.replace("\\frac", "\\dfrac")
    yield re.sub(r"([+=])", r" \1 ", truth)
    yield f"${truth}$."
    yield f"**{truth}**"
    if "\\left" not in truth:
        yield truth.replace("(", "\\left(").replace(")", "\\right)")
    if re.fullmatch(r"-?[0-9]{4,}", truth):
        yield f"{int(truth):,}"
    if re.fullmatch(r"-?[0-9]+", truth):
        yield from (
            f"{truth}.0",
            f"{truth}\\text{{ apples}}",
            f"x = {truth}",
            f"\\${truth}" if truth[0] != "-" else truth,
        )


def neighbours(rng: random.Random, truth: str) -> Iterator[tuple[str, str]]:
    """(what was done to it, another answer)"""
    numbers = list(re.finditer(r"(?<![0-9A-Za-z_.,\\{])[0-9]+(?![0-9A-Za-z_.,])", truth))
    if numbers:
        at = rng.choice(numbers)
        n, before, after = int(at.group()), truth[: at.start()], truth[at.end() :]
        yield "one more", f"{before}{n + 1}{after}"
        yield "one less", f"{before}{abs(n - 1)}{after}"
        if not re.match(r"\s*[_^!:]|\s*\\(?:frac|text|mbox|circ)", after) and "_" not in truth:
            yield "undone", f"{before}({n - 1}+1){after}"
            yield "undone", f"{before}\\frac{{{2 * n}}}{{2}}{after}"
            yield "undone", f"{before}(2\\cdot {n}-{n}){after}"
    if re.match(r"[0-9\\(]", truth) and not re.match(r"\\(?:text|mbox|pm|emptyset|begin|{)", truth):
        yield "negated", f"-{truth}"
    point = re.fullmatch(r"\(([^(),]+),([^(),]+)\)", truth)
    if point and point[1].strip() != point[2].strip():
        yield "exchanged", f"({point[2]},{point[1]})"


def real_answers(paths: list[str]) -> None:
    answers, rng = gold(paths), random.Random(0)
    kinds: dict[str, list[Item]] = {
        "themselves": [(f"\\boxed{{{a}}}", a, True) for a in answers],
        "in another hand": [(f"\\boxed{{{b}}}", a, True) for a in answers for b in in_another_hand(a) if b != a],
        "neighbours": [(f"\\boxed{{{b}}}", a, False) for a in answers for _, b in neighbours(rng, a)],
    }
    print(f"{len(answers):,} different answers of {', '.join(Path(path).name for path in paths)}")
    for name, verifier in (("rpg", here), ("math-verify", math_verify)):
        for kind, items in kinds.items():
            some = items if name == "rpg" else items[:: max(1, len(items) // 400)]
            verifier(some[:1])  # imports
            start = time.perf_counter()
            found = verifier(some)
            rate = len(some) / (time.perf_counter() - start)
            print(f"{name}: {kind}: {sum(found):,} of {len(some):,} taken for right, {rate:,.0f}/s", flush=True)
            for (given, truth, right), got in zip(some, found, strict=True):
                if name == "rpg" and got != right:
                    print(f"    {'right' if got else 'wrong'}, it says: {given} for {truth}")


# ---- verifiers -------------------------------------------------------------------------------------------------------

Verifier = Callable[[list[Item]], list[bool]]


def here(items: list[Item]) -> list[bool]:
    """As in a worker of a Scorer: sympy in this process."""
    worker.inside_worker = True
    try:
        return [verify(response, truth) for response, truth, _ in items]
    finally:
        worker.inside_worker = False


def own_worker(items: list[Item]) -> list[bool]:
    return [verify(response, truth) for response, truth, _ in items]


def scored(count: int) -> Verifier:
    def run(items: list[Item]) -> list[bool]:
        with Scorer(reward, workers=count) as scorer:
            scorer.score([("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", "")] * count)  # workers up, sympy loaded
            start = time.perf_counter()
            values = scorer.score([(response, truth, "") for response, truth, _ in items]).values
            run.seconds = time.perf_counter() - start  # type: ignore[attr-defined]
            return [value > 0.5 for value in values]

    return run


def reward(response: str, answer: str, prompt: str) -> float:
    return float(verify(response, answer))


def lenient(items: list[Item]) -> list[bool]:
    worker.inside_worker = True
    try:
        return [verify(response, truth, lenient=True) for response, truth, _ in items]
    finally:
        worker.inside_worker = False


def math_verify(items: list[Item]) -> list[bool]:
    from math_verify import parse
    from math_verify import verify as same

    return [same(parse(f"${truth}$"), parse(response)) for response, truth, _ in items]


def trl(items: list[Item]) -> list[bool]:
    from trl.rewards import accuracy_reward

    found = []
    for response, truth, _ in items:
        try:
            value = accuracy_reward([[{"role": "assistant", "content": response}]], [f"${truth}$"])[0]
        except Exception:
            value = None
        found.append(bool(value))
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------


def speeds(count: int, workers: int) -> None:
    print(f"verifications/s (wrong verdicts of n); {SAMPLES} responses a truth, no response twice; {workers} workers")
    rng = random.Random(0)
    sets = {
        "GSM8K-style": list(gsm8k(rng, count * 10)),
        "MATH-style": list(mathematics(rng, count)),
        "hostile": list(hostile(rng, len(HOSTILE))),
    }
    rows: list[tuple[str, Verifier]] = [("rpg, one process", here), ("rpg, own worker", own_worker)]
    rows += [(f"rpg, Scorer of {workers}", scored(workers)), ("math-verify", math_verify)]
    if importlib.util.find_spec("trl"):
        rows.append(("TRL accuracy_reward", trl))
    print("| |" + "|".join(sets) + "|\n|---|" + "---|" * len(sets))
    rates: dict[str, dict[str, float]] = {}
    for name, verifier in rows:
        cells, rates[name] = [], {}
        for kind, items in sets.items():
            part = items if "rpg" in name else items[: max(count // 4, 100)]
            verifier(part[:2])  # imports
            times = []
            for _ in range(1 if kind == "hostile" else ROUNDS):
                forget()
                start = time.perf_counter()
                found = verifier(part)
                times.append(getattr(verifier, "seconds", None) or time.perf_counter() - start)
            seconds = min(times)
            wrong = sum(a != b for a, (_, _, b) in zip(found, part, strict=True))
            rates[name][kind] = len(part) / seconds
            cells.append(
                f"{len(part) / seconds:,.0f}/s ({wrong} of {len(part):,})"
                if kind != "hostile"
                else f"{seconds:.1f} s for {len(part)} ({wrong})"
            )
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    for name, kinds in rates.items():
        faster = (f"{rate / rates['math-verify'][kind]:,.1f} {kind}" for kind, rate in kinds.items())
        print(f"  {name}, times math-verify: " + ", ".join(faster))


def forget() -> None:
    """No verdict and no parsed expression of an earlier round, here or in verify's own worker."""
    from rpg.verify import mathematics

    module = sys.modules["rpg.verify.judge"]
    for cached in (module.judged, mathematics.parse, mathematics.value):
        cached.cache_clear()
    if module._scorer is not None:
        module._scorer.close()
        verify("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")  # a new one, with sympy loaded


def agreement() -> None:
    pairs = list(judged())
    items = [(response, truth, right) for response, truth, right, _ in pairs]
    print(f"\n{len(pairs)} pairs judged by hand, {sum(not p[2] for p in pairs)} of them wrong")
    verifiers: list[tuple[str, Verifier]] = [("rpg", here), ("math-verify", math_verify)]
    if importlib.util.find_spec("trl"):
        verifiers.append(("TRL accuracy_reward", trl))
    found_by = {name: verifier(items) for name, verifier in [*verifiers, ("lenient", lenient)]}
    alike = sum(a == b for a, b in zip(found_by["lenient"], found_by["math-verify"], strict=True))
    print(f"rpg, lenient, gives math-verify's verdict on {alike} of {len(pairs)} pairs")
    alike = sum(a == b for a, b in zip(found_by["rpg"], found_by["math-verify"], strict=True))
    print(f"rpg, strict, gives math-verify's verdict on {alike} of {len(pairs)} pairs")
    for name, _ in verifiers:
        found = found_by[name]
        one_of = f"of {len(pairs)} pairs"
        false = [pair for pair, got in zip(pairs, found, strict=True) if got and not pair[2]]
        missed = [pair for pair, got in zip(pairs, found, strict=True) if not got and pair[2]]
        print(f"\n{name} disagrees with {len(false) + len(missed)} {one_of}: takes {len(false)} wrong ones for right")
        for kind, rows in (("right, it says", false), ("wrong, it says", missed)):
            for response, truth, _, why in rows if name == "math-verify" else rows[:0]:
                print(f"  {kind}: {response!r:.70} for {truth!r:.40}: {why}")


def fuzz(count: int, seed: int) -> None:
    reasons: Counter[str] = Counter()
    slowest: list[tuple[float, str, str]] = []
    right = 0
    start = time.perf_counter()
    for response, truth in fuzzed(seed, count):
        begun = time.perf_counter()
        found = verdict(response, truth)
        slowest = sorted([*slowest, (time.perf_counter() - begun, response, found.reason)], reverse=True)[:5]
        reasons[found.reason.partition(":")[0]] += 1
        right += found.right
    print(
        f"{count:,} fuzzed answers in {time.perf_counter() - start:.0f} s; {right} right; none raised, hung or killed"
    )
    for reason, times in reasons.most_common():
        print(f"  {times:6,}  {reason}")
    print(
        "slowest:",
        *(f"  {seconds:.2f} s  {response!r:.80}  {reason}" for seconds, response, reason in slowest),
        sep="\n",
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--items", type=int, default=2000, help="MATH-style items; ten times as many of GSM8K-style")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fuzz", type=int, metavar="N", help="verify N fuzzed answers instead")
    parser.add_argument("--pairs", action="store_true", help="the pairs judged by hand, and no speeds")
    parser.add_argument("--gold", nargs="+", metavar="FILE", help="the answers of these datasets instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(None if arguments is None else list(arguments))
    logging.disable(logging.CRITICAL)  # math-verify logs answers whole
    if options.gold:
        real_answers(options.gold)
    elif options.fuzz:
        fuzz(options.fuzz, options.seed)
    else:
        if not options.pairs:
            speeds(options.items, options.workers)
        agreement()


if __name__ == "__main__":
    main()
