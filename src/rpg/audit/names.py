"""The name of a mistake, where its gradient gives it away.

What a loss makes of the reward and what it makes of the KL are told apart by setting all rewards to zero. Each part's
expected gradient is then projected on those of a dictionary of wrong losses: a formula (k3 without its weight, a ratio
upside down), a level, an exchange of what is given (old for ref), and a way to sum. A name is given only if one entry
leaves no residual on every problem, all scenarios, both kinds of lengths and several seeds. No source is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .box import DRIFT as DRIFT_IN_BOX
from .measure import Coefficients, Subject
from .problem import AT_REST, SCENARIOS, EnumeratedBatch, EnumeratedProblem

SEEDS = 3
TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-4}
MICRO_BATCHES = (2, 3, 4, 5, 6, 8, 10, 12)
NOTHING = 1e-9  # relative to |∇E[R]|, or to the loss's largest coefficient


@dataclass(frozen=True)
class LogRatios:
    """What a formula is made of, [N,T]: log π/μ, log ref/μ and log π/ref, of a token or of its whole response."""

    w: Tensor
    v: Tensor
    u: Tensor


Formula = Callable[[LogRatios], Tensor]  # the factor of −A, or of β, in d loss / d log π
Words = str

REWARD: dict[str, tuple[Formula, Words]] = {
    "w": (lambda r: r.w.exp(), ""),
    "1": (lambda r: torch.ones_like(r.w), "the importance weight w is missing on the reward"),
    "w²": (lambda r: (2 * r.w).exp(), "the weight w is applied twice to the reward"),
    "1/w": (lambda r: -(-r.w).exp(), "the ratio is upside down, old/π"),
    "√w": (lambda r: (r.w / 2).exp(), "the log-ratio of the reward is halved"),
}
MISSING = "the weight w is missing on the KL"
KL: dict[str, tuple[Formula, Words]] = {
    "urkl": (lambda r: r.w.exp() * r.u, ""),
    "rkl": (lambda r: r.w.exp() * (r.u + 1), ""),
    "ufkl": (lambda r: r.w.exp() - r.v.exp(), ""),
    "fkl": (lambda r: -r.v.exp(), ""),
    "k3": (lambda r: 1 - (-r.u).exp(), f"{MISSING} (k3, as GRPO was published)"),
    "k2": (lambda r: r.u, f"{MISSING} (k2)"),
    "k1": (lambda r: torch.ones_like(r.u), f"{MISSING} (k1, which has no gradient on-policy)"),
    "|k1|": (lambda r: r.u.sign(), f"{MISSING} (|k1|)"),
    "k3 of 1/u": (lambda r: r.u.exp() - 1, f"{MISSING}, and k3 is upside down: π/ref for ref/π"),
    "w·k3 of 1/u": (lambda r: r.w.exp() * (2 * r.u.exp() - 2 - r.u), "k3 is upside down: π/ref for ref/π"),
    "w k3 of 1/u": (lambda r: r.w.exp() * (r.u.exp() - 1), "k3 is upside down, π/ref for ref/π, and w is detached"),
    "w·k2": (lambda r: r.w.exp() * (r.u + r.u.square() / 2), "w must be detached in w·k2"),
    "w²": (lambda r: (2 * r.w).exp() * r.u, "the weight w is applied twice to the KL"),
    "1/u": (lambda r: -(-r.u).exp(), "the KL's weight is ref/π, not ref/old"),
    "w": (lambda r: r.w.exp(), "the KL has no gradient in the mean: w is detached in w·k1"),
}
NO_REWARD = "the reward has no gradient (is the ratio detached?)"
NO_KL = "the KL has no gradient (is it detached, or left out?)"
MEAN_ZERO = "w"
ALIKE = {name: pair for pair in (("rkl", "urkl"), ("fkl", "ufkl")) for name in pair}  # one expected gradient

LEVELS = {
    "token": "the ratio is a token's, and the objective's is another",
    "sequence": "the ratio is the product over the response, and the objective's is another",
    "geometric": "the ratio is the geometric mean over the response, and the objective's is another",
}
WHOLE_KL = "every token's reward holds the KL of the whole response"

AS_GIVEN, SWAPPED, ANCHORED = "", "old and ref are swapped", "the KL is anchored to old, not to ref"
GIVEN: dict[Words, Callable[[EnumeratedBatch], EnumeratedBatch]] = {
    AS_GIVEN: lambda b: b,
    SWAPPED: lambda b: replace(b, old_logp_NT=b.ref_logp_NT, ref_logp_NT=b.old_logp_NT),
    ANCHORED: lambda b: replace(b, ref_logp_NT=b.old_logp_NT),
    "old is one token late": lambda b: replace(b, old_logp_NT=_shifted(b.old_logp_NT, 1)),
    "old is one token early": lambda b: replace(b, old_logp_NT=_shifted(b.old_logp_NT, -1)),
    "ref is one token late": lambda b: replace(b, ref_logp_NT=_shifted(b.ref_logp_NT, 1)),
    "ref is one token early": lambda b: replace(b, ref_logp_NT=_shifted(b.ref_logp_NT, -1)),
}
OTHERS = "each response has another's advantage"
ADVANTAGES: dict[Words, Callable[[Tensor], Tensor]] = {
    "": lambda a: a,
    f"{OTHERS}: they are one off": lambda a: a.roll(1),
    f"{OTHERS}, they are one off": lambda a: a.roll(-1),
    f"{OTHERS}: their order is reversed": lambda a: a.flip(0),
    "only the sign of the advantage counts": lambda a: a.sign(),
}

PADDING, LENGTH = "padding counts", "each response is divided by its own length"
MICRO_BATCH = "mean over the micro-batch"

STD = "the advantages are divided by their standard deviation inside the loss, the KL is not"
DENOMINATORS = "reward and KL are divided by different numbers"


def _shifted(x_NT: Tensor, by: int) -> Tensor:
    """Moved along the tokens; what comes in is zero."""
    moved_NT = x_NT.roll(by, 1)
    moved_NT[:, 0 if by > 0 else -1] = 0
    return moved_NT


def sums(mask_NT: Tensor) -> dict[Words, Tensor]:
    """What each token counts, by the way a loss sums; the first is right."""
    m = mask_NT.double()
    length_N1 = m.sum(1, keepdim=True)
    last = m * (m.cumsum(1) == length_N1)
    first = torch.zeros_like(m)
    first[:, 0] = 1
    ways = {
        "": m,
        PADDING: torch.ones_like(m),
        LENGTH: m / length_N1,
        f"{PADDING}, and {LENGTH}": torch.ones_like(m) / length_N1,
        "the last token (the EOS) does not count": m - last,
        "the first token does not count": m - first,
        "the mask is one token late": _shifted(m, 1),
        "the mask is one token early": _shifted(m, -1),
        "only the last token counts": last,
        "only the first token counts": first,
        "each response is multiplied by its length": m * length_N1,
        "each response is divided by the square root of its length": m / length_N1.sqrt(),
    }
    rows_N = torch.arange(len(m))
    for size in MICRO_BATCHES:
        of_rows = {f"{size} rows each": rows_N // size, f"{size} of them": rows_N // -(-len(m) // size)}
        for how, block_N in (of_rows | {f"{size} of them, dealt out": rows_N % size}).items():
            tokens_B = torch.zeros(int(block_N.max()) + 1, dtype=m.dtype).index_add(0, block_N, length_N1[:, 0])
            ways[f"{MICRO_BATCH} ({how})"] = m / tokens_B[block_N][:, None]
    return ways


@dataclass(frozen=True)
class Entry:
    """One line of the dictionary: where a part of the loss departs from the right one, in four ways."""

    formula: str
    level: str
    given: Words
    advantages: Words
    sum: Words

    def departures(self, right: Right) -> int:
        formula, level, way = self.formula in right.formulas, self.level == right.level, self.sum == right.sum
        return [formula, level, way, not self.given, not self.advantages].count(False)


@dataclass(frozen=True)
class Right:
    formulas: Sequence[str]
    level: str
    sum: Words = ""


def log_ratios(b: EnumeratedBatch, level: str) -> LogRatios:
    token = (b.logp_NT - b.old_logp_NT, b.ref_logp_NT - b.old_logp_NT, b.logp_NT - b.ref_logp_NT)
    if level == "token":
        return LogRatios(*token)
    w, v, u = ((x * b.mask_NT).sum(1, keepdim=True).expand_as(x) for x in token)
    if level == WHOLE_KL:
        return LogRatios(*token[:2], u)
    length_N1 = b.mask_NT.sum(1, keepdim=True) if level == "geometric" else 1
    return LogRatios(w / length_N1, v / length_N1, u / length_N1)


def _terms(formulas: dict[str, tuple[Formula, Words]], kl: bool) -> Iterator[Entry]:
    for formula, level in product(formulas, LEVELS):
        yield Entry(formula, level, AS_GIVEN, "", "")
    for given, formula in product(GIVEN, formulas):
        if given and (kl or not (given == ANCHORED or given.startswith("ref"))):
            yield Entry(formula, "token", given, "", "")
    if kl:
        yield Entry("urkl", WHOLE_KL, AS_GIVEN, "", "")
    else:
        for advantages, formula in product(ADVANTAGES, ("w", "1")):
            if advantages:
                yield Entry(formula, "token", AS_GIVEN, advantages, "")


class Dictionary:
    """The expected gradients of one part of every wrong loss, on every problem: [K, problems, P]."""

    def __init__(self, problems: Sequence[EnumeratedProblem], kl: bool) -> None:
        formulas = KL if kl else REWARD
        terms = list(_terms(formulas, kl))
        ways = list(sums(problems[0].mask_NT))
        self.entries = [replace(term, sum=way) for term in terms for way in ways]
        gradients = []
        for problem in problems:
            way_ANT = torch.stack(list(sums(problem.mask_NT).values()))
            term_FNT = torch.stack([_coefficients(term, formulas, problem, kl) for term in terms])
            c_KNT = (term_FNT.unsqueeze(1) * way_ANT).flatten(0, 1)
            gradients.append(c_KNT.flatten(1) @ problem.weighted_score_KP)
        self.gradients = torch.stack(gradients, 1)


def _coefficients(
    term: Entry, formulas: dict[str, tuple[Formula, Words]], problem: EnumeratedProblem, kl: bool
) -> Tensor:
    b = GIVEN[term.given](problem.batch)
    factor_NT = formulas[term.formula][0](log_ratios(b, term.level))
    if term.level == "geometric":
        factor_NT = factor_NT / b.mask_NT.sum(1, keepdim=True)
    return problem.beta * factor_NT if kl else -ADVANTAGES[term.advantages](b.advantages_N)[:, None] * factor_NT


@dataclass(frozen=True)
class Match:
    entry: Entry
    factor_Q: Tensor  # of each problem


@dataclass(frozen=True)
class Found:
    """What is wrong with either part, in words; nothing if it is right, None if no entry is like it."""

    reward: Sequence[Words] | None
    kl: Sequence[Words] | None
    both: bool = True  # has it both?

    @property
    def is_whole(self) -> bool:
        return self.reward is not None and self.kl is not None

    @property
    def words(self) -> list[Words]:
        """What is wrong with both is said once; what could be and is not, with its place."""
        reward, kl = self.reward or (), self.kl or ()
        if not self.is_whole:
            return [*reward, *kl]
        either = {*GIVEN, *sums(torch.ones(2, 2))} - {ANCHORED}
        placed = (
            f"{words}, in the {part}" if words in either and self.both else words
            for part, said, other in (("reward", reward, kl), ("KL", kl, reward))
            for words in said
            if words not in other
        )
        return [*(words for words in reward if words in kl), *placed]


class Recogniser:
    """Names for losses that are off; made once for all of them."""

    def __init__(self, beta: float, drift: float) -> None:
        self.beta, self.drift = beta, drift
        self._problems = cache(self._make)
        self._dictionary = cache(lambda drift, kl: Dictionary(self._problems(drift), kl))

    def _make(self, drift: float) -> list[EnumeratedProblem]:
        settings = product(SCENARIOS, (True, False), range(SEEDS))
        return [EnumeratedProblem(s, variable, seed, beta=self.beta, drift=drift) for s, variable, seed in settings]

    def names(self, subject: Subject) -> list[Words]:
        """What is wrong with it, in words; nothing where it cannot be told.

        First with its clip open, as far as that can be done, then as shipped where its clip should do nothing.
        """
        open_ = self._found(subject, subject.coefficients, self.drift)
        if open_.is_whole and open_.words:
            return open_.words
        if not open_.is_whole and subject.dtype != torch.float64:  # so close together its rounding hides the difference
            return open_.words
        shipped = self._found(subject, subject.clipped or subject.coefficients, DRIFT_IN_BOX)
        if open_.is_whole:
            return [f"with its clip on, {words}" for words in shipped.words]
        return shipped.words if shipped.is_whole else open_.words or shipped.words

    def _found(self, subject: Subject, coefficients: Coefficients, drift: float) -> Found:
        problems = self._problems(drift)
        c_QNT = [coefficients(p.batch, self.beta) for p in problems]
        unrewarded_QNT = [coefficients(p.batch.with_rewards_times(0.0), self.beta) for p in problems]
        if not all(torch.isfinite(c_NT).all() for c_NT in (*c_QNT, *unrewarded_QNT)):
            return Found(None, None)
        kl_QP = _gradients(problems, unrewarded_QNT)
        reward_QP = _gradients(problems, c_QNT) - kl_QP
        tolerance = TOLERANCE[subject.dtype]
        level = subject.objective.partition(",")[0]

        reward, reward_words = None, None
        if (reward_QP.norm(dim=1) <= NOTHING * kl_QP.norm(dim=1)).all():
            reward_words = [NO_REWARD]
        elif reward := _simplest(self._matches(reward_QP, drift, False, tolerance), Right(("w",), level)):
            reward_words = _reward_words(reward, level)

        stated = subject.divergence != "none"
        size_Q = torch.stack([p.objective_gradient(subject.objective, "none").norm() for p in problems])
        scale_Q = reward.factor_Q.abs() if reward else torch.ones_like(size_Q)
        if (kl_QP.norm(dim=1) <= NOTHING * scale_Q * size_Q).all():
            silent = all(float(c_NT.abs().max()) <= NOTHING for c_NT in unrewarded_QNT)
            lost = [NO_KL if silent else KL[MEAN_ZERO][1]]
            return Found(reward_words, lost if stated else [], both=False)
        right = Right(ALIKE.get(subject.divergence, ()), level, reward.entry.sum if reward else "")
        if subject.objective == "geometric, token KL":
            right = replace(right, level="token", sum=LENGTH)
        kl = _simplest(self._matches(kl_QP, drift, True, tolerance), right)
        if kl is None:
            return Found(reward_words, None)
        if not stated:
            return Found(reward_words, ["there is a KL term, though none was stated"])
        if subject.objective == "geometric, token KL" and kl.entry.sum == LENGTH:
            kl = replace(kl, entry=replace(kl.entry, sum=""))  # as it should be
        kl_words = _kl_words(kl.entry, right, subject.divergence)
        if reward:
            kl_words += _balance_words(kl.factor_Q / reward.factor_Q, self._deviations(drift), self.beta, tolerance)
        return Found(reward_words, kl_words)

    def _deviations(self, drift: float) -> Tensor:
        return torch.stack([p.rewards_N.std() for p in self._problems(drift)])

    def _matches(self, wanted_QP: Tensor, drift: float, kl: bool, tolerance: float) -> list[Match]:
        """The entries that are the wanted gradient times a number, on each problem."""
        dictionary = self._dictionary(drift, kl)
        candidate_KQP = dictionary.gradients
        squared_KQ = candidate_KQP.square().sum(-1)
        factor_KQ = (candidate_KQP * wanted_QP).sum(-1) / squared_KQ.clamp(min=1e-300)
        wanted_Q, typical = wanted_QP.norm(dim=1), float(wanted_QP.norm(dim=1).median())
        # where the wanted one vanishes, so must the candidate, and its factor is not known
        absent_Q = wanted_Q <= NOTHING * typical
        vanishes_KQ = squared_KQ.sqrt() <= NOTHING * squared_KQ.sqrt().median(dim=1, keepdim=True).values
        residual_KQ = (wanted_QP - factor_KQ.unsqueeze(-1) * candidate_KQP).norm(dim=-1)
        same_KQ = torch.where(absent_Q, vanishes_KQ, residual_KQ <= tolerance * wanted_Q)
        factor_KQ = torch.where(absent_Q, torch.nan, factor_KQ)
        return [Match(dictionary.entries[k], factor_KQ[k]) for k in same_KQ.all(1).nonzero().flatten().tolist()]


def _gradients(problems: Sequence[EnumeratedProblem], c_QNT: Sequence[Tensor]) -> Tensor:
    return torch.stack([c_NT.flatten() @ p.weighted_score_KP for p, c_NT in zip(problems, c_QNT, strict=True)])


def _simplest(matches: Sequence[Match], right: Right) -> Match | None:
    """Of several explanations the one with the fewest departures; one whose sign differs between problems is none."""

    def has_one_sign(match: Match) -> bool:
        known_Q = match.factor_Q[~match.factor_Q.isnan()]
        return bool((known_Q > 0).all() or (known_Q < 0).all())

    return min(filter(has_one_sign, matches), key=lambda m: m.entry.departures(right), default=None)


def _reward_words(match: Match | None, level: str) -> list[Words]:
    if match is None:
        return []
    e = match.entry
    words = [e.given, e.advantages, e.sum, REWARD[e.formula][1]]
    words.append(LEVELS[e.level] if e.level != level and e.formula != "1" else "")
    words.append("the reward has the wrong sign" if match.factor_Q.nanmedian() < 0 else "")
    return [w for w in words if w]


def _kl_words(e: Entry, right: Right, divergence: str) -> list[Words]:
    words = [e.given, e.sum, KL[e.formula][1]]
    if e.formula in ALIKE and e.formula not in right.formulas:
        normalised, unnormalised = ALIKE[e.formula]
        words.append(f"this is {unnormalised}'s gradient (and {normalised}'s), not {divergence}'s")
    if e.level == WHOLE_KL:
        words.append(WHOLE_KL)
    elif e.level != right.level and e.formula not in ("k1", MEAN_ZERO):
        words.append(f"in the KL {LEVELS[e.level]}")
    return [w for w in words if w]


def _balance_words(ratio_Q: Tensor, deviation_Q: Tensor, beta: float, tolerance: float) -> list[str]:
    """The KL's size against the reward's, over what β says."""
    known = ~ratio_Q.isnan()
    ratio_Q, deviation_Q = ratio_Q[known], deviation_Q[known]

    def constant(x_Q: Tensor) -> bool:
        return float(x_Q.max() - x_Q.min()) <= 10 * tolerance * float(x_Q.abs().max())

    if not constant(ratio_Q):
        return [STD if constant(ratio_Q / deviation_Q) else DENOMINATORS]
    ratio = float(ratio_Q.mean())
    words = ["the KL has the wrong sign"] if ratio < 0 else []
    size = abs(ratio)
    for factor, text in (
        (1.0, ""),
        (2.0, "the KL counts twice"),
        (0.5, "the KL counts half"),
        (1 / beta, "β is missing: the KL counts in full"),
        (beta, "β is applied twice"),
    ):
        if abs(size / factor - 1) < 1e-3:
            return [*words, text] if text else words
    return [*words, f"the KL counts {size:.3g} times"]


# ---- the clip --------------------------------------------------------------------------------------------------------
#
# A clip with a pessimistic min cuts only what has gone far enough: a ratio above the box where A > 0, one below it
# where A < 0. On the other side a ratio must find its way back. So tokens are given ratios far out: which of them still
# answer to the reward?

SWAPPED = "the clip cuts on the wrong side: min and max are swapped"
NO_MIN = "the clip also cuts ratios that must come back: a mask on both sides, or PPO's min is missing"
FAR_OUT = 2.0  # times or divided by: outside ±20 %, and inside the second bound of a dual clip
LARGE = 0.3  # advantages whose sign no KL term turns
STEP = 1e-3  # by which the rewards grow
SILENT = 1e-6  # of what a token answers with a ratio of 1

Cell = tuple[bool, bool]  # A > 0?, ratio above 1?
RIGHT_SIDE: frozenset[Cell] = frozenset({(True, True), (False, False)})
WRONG_SIDE: frozenset[Cell] = frozenset({(True, False), (False, True)})


def wrong_side(coefficients: Coefficients, beta: float) -> str | None:
    """What is wrong with the clip's sides; None where it is right, where there is no clip, and where it is unclear."""
    cells = cut_cells(coefficients, beta)
    if cells == WRONG_SIDE:
        return SWAPPED
    return NO_MIN if cells == RIGHT_SIDE | WRONG_SIDE else None


def cut_cells(coefficients: Coefficients, beta: float) -> frozenset[Cell] | None:
    """Where the clip cuts every token; None where it cuts some and not others, or where none answers anyway."""
    b = EnumeratedProblem(AT_REST, variable=False, seed=0).batch
    usual_NT = _answer(coefficients, b, beta)
    if not (usual_NT > 0.01 * STEP * coefficients(b, beta).abs())[b.advantages_N.abs() > LARGE].all():
        return None
    cut: set[Cell] = set()
    for high in (True, False):
        far = replace(b, old_logp_NT=b.old_logp_NT + (-1 if high else 1) * math.log(FAR_OUT))
        is_cut_NT = _answer(coefficients, far, beta) <= SILENT * usual_NT
        for positive in (True, False):
            rows_N = (b.advantages_N if positive else -b.advantages_N) > LARGE
            cell_KT = is_cut_NT[rows_N]
            if cell_KT.all():
                cut.add((positive, high))
            elif cell_KT.any():
                return None
    return frozenset(cut)


def _answer(coefficients: Coefficients, b: EnumeratedBatch, beta: float) -> Tensor:
    """How much each token's coefficient changes with the rewards."""
    return (coefficients(b.with_rewards_times(1 + STEP), beta) - coefficients(b, beta)).abs()
