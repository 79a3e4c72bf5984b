"""What a method is: ``Algorithm`` as published, ``Method`` as one run has it. Presets by name; methods/ has the rows.

"old" is the sampling policy; ``reference`` says which policy anchors the KL term: "old" (updated every iteration, no
second model is held), "initial" (the model training began from), "average" (a moving average of the weights) or
"teacher" (another model, which a run has to name).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

from torch import Tensor

from ..console import brief, choose, one_of
from . import OTHER_NAMES
from .advantages import Advantage, Range
from .policy_loss import PolicyLoss

ANCHORS = {"old": "old", "initial": "frozen", "average": "ema", "teacher": "frozen"}  # a preset's word: the rule
NEEDS_TEACHER = "it learns from a teacher, reference.model"


@dataclass(frozen=True)
class Algorithm:
    """A loss, the advantage it was published with, and what the training loop must do around them."""

    name: str
    loss: PolicyLoss
    advantage: Advantage
    paper: str = field(default="", repr=False)
    formula: str = field(default="", repr=False)
    reference: str = "old"
    dynamic_sampling: bool = False  # groups without signal are dropped and sampled again
    min_signal: float = 0.0  # share of a step's groups that must have signal, or more are sampled (GPG)
    overlong_penalty: bool = False  # advantages.soft_overlong_penalty is added to the reward
    curvature_gate: bool = False  # clip.curvature_keep is passed to the loss as ``keep``
    note: str = field(default="", repr=False)  # what a user should know at the start of a run

    __repr__ = brief

    @property
    def only_here(self) -> str | None:
        """Why it runs in ``rpg train`` alone: what TRL and verl do not give it. None: it runs there too."""
        return self.resolve().only_here

    def resolve(
        self,
        dynamic: bool | None = None,
        overlong: bool | None = None,
        update: str = "auto",
        *,
        min_signal: float | None = None,
        rewards: Range | None = None,
    ) -> Method:
        """With a run's own choices; None and "auto" are as published. Without a KL there is nothing to anchor: old.

        ``rewards``: where they lie, if that is known.
        """
        one_of("reference", self.reference, ANCHORS)
        anchor = ANCHORS[self.reference] if update == "auto" else update
        if update == "auto" and self.advantage.beta > 0 and anchor == "old":  # from the sampler itself it would be 0
            anchor = "frozen"
        overlong = self.overlong_penalty if overlong is None else overlong
        if overlong and self.advantage.kind == "success-rate":
            raise ValueError(
                f"{self.name} divides by the mean reward, which an overlong penalty makes negative: leave it"
            )
        method = Method(
            name=self.name,
            loss=self.loss,
            advantage=self.advantage.for_rewards(rewards),
            dynamic=self.dynamic_sampling if dynamic is None else dynamic,
            overlong=overlong,
            anchor=anchor,
            curvature_gate=self.curvature_gate,
            min_signal=self.min_signal if min_signal is None else min_signal,
            note=self.note,
            taught=self.reference == "teacher",
        )
        return method if method.has_kl else replace(method, anchor="old")


@dataclass(frozen=True)
class Method:
    """An algorithm as one run has it. What is decided here is read everywhere, and decided nowhere else."""

    name: str
    loss: PolicyLoss
    advantage: Advantage
    dynamic: bool  # groups without signal are dropped and sampled again
    overlong: bool  # advantages.soft_overlong_penalty is added to the reward
    anchor: str  # of the KL: old (no second model is held), or a copy: every, kl, ema, frozen (loss/anchor.py)
    curvature_gate: bool = False  # clip.curvature_keep is passed to the loss as ``keep``
    min_signal: float = 0.0  # share of a step's groups that must have signal, or more are sampled
    note: str = ""  # what a user should know at the start of a run
    taught: bool = False  # its anchor is a teacher

    @property
    def only_here(self) -> str | None:
        """Why it runs in ``rpg train`` alone: what TRL and verl do not give it. None: it runs there too."""
        return self.loss.only_here or self.advantage.only_here or (NEEDS_TEACHER if self.taught else None)

    @property
    def has_kl(self) -> bool:
        """In the loss, or in the reward."""
        return self.loss.has_kl or self.advantage.beta > 0

    def remarks(self, rewards: Range | None) -> list[str]:
        """What a user should know at the start, one line each. ``rewards``: where they lie, if that is known."""
        return [f"{self.name}: {text}" for text in (self.note, *self.advantage.about_rewards(rewards)) if text]

    @property
    def needs_reference(self) -> bool:
        """Whether it is another method without the log-probabilities of a reference."""
        return "ref_logp" in self.loss.needs or self.advantage.beta > 0

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt needs its most probable response too."""
        return self.advantage.kind == "greedy-baseline"


LONGEST = "longest"  # as the constant of a denominator: the longest response that a run allows
_PRESETS: dict[str, Callable[[], Algorithm]] = {}
_ROWS: dict[str, Callable[[], Algorithm]] = {}
_PLAIN: dict[str, Callable[..., Tensor]] = {}


def preset(name: str, paper: str) -> Callable[[Callable[[], Algorithm]], Callable[[], Algorithm]]:
    """Register a method's row: a function whose docstring is the method's formula."""

    def register(make: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
        formula = " ".join((make.__doc__ or "").split())
        _PRESETS[name] = lambda: replace(make(), name=name, paper=paper, formula=formula)
        _ROWS[name] = make
        return make

    return register


def plain(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a method's plain form: plain torch, the same gradient as the row's."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _PLAIN[name] = function
        return function

    return register


def row(loss: PolicyLoss, advantage: Advantage, **around: object) -> Algorithm:
    """An algorithm that ``preset`` gives its name, paper and formula."""
    return Algorithm("", loss, advantage, **around)  # type: ignore[arg-type]


def plain_form(name: str) -> Callable[..., Tensor]:
    """A preset's loss in plain torch: f(logp, old, ref, A, mask), [B,T] each, A [B,1] or [B,T]."""
    return _PLAIN[name]


def sources(name: str) -> tuple[str, str]:
    """A preset's row, and its plain form after the small functions that it calls, as they are written."""
    plain_function = _PLAIN[name]
    helpers = _helpers(plain_function)
    plain_texts = [_source(helpers[called]) for called in sorted(helpers)] + [_source(plain_function)]
    return _source(_ROWS[name]), "\n\n".join(plain_texts)


def _helpers(function: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """The functions that a plain form calls, directly or through one another, by name."""
    known = function.__globals__
    called: dict[str, Callable[..., Tensor]] = {
        n: known[n] for n in function.__code__.co_names if inspect.isfunction(known.get(n))
    }
    for helper in list(called.values()):
        called |= _helpers(helper)
    return called


def _source(function: Callable[..., object]) -> str:
    text = inspect.getsource(function)
    return text[text.index("def ") :].rstrip()


def algorithms() -> list[str]:
    """The names of all presets."""
    return list(_PRESETS)


def algorithm(name: str, **overrides: object) -> Algorithm:
    """A preset by name. Keywords override its loss (``beta=…``), its clip (``high=…``) or the algorithm itself
    (``advantage="leave-one-out"``, ``advantage={"beta": 0.1}`` or ``advantage=Advantage(…)``)."""
    if name not in _PRESETS:
        raise ValueError(choose("algorithm", str(name), _PRESETS))
    chosen = _PRESETS[name]()
    overrides = with_advantage(overrides, chosen.advantage)
    if overrides.get("constant") == LONGEST:
        raise ValueError(
            f"constant={LONGEST!r} is the longest response that a run allows: outside a run give the number"
        )
    algorithm_fields = {f.name for f in fields(Algorithm)} - {"name", "paper", "formula"}
    loss_fields = {f.name for f in fields(PolicyLoss)}
    loss_given = overrides.get("loss", chosen.loss)
    rule = overrides.get("clip", loss_given.clip if isinstance(loss_given, PolicyLoss) else None)
    clip_fields = {f.name for f in fields(rule)} if is_dataclass(rule) else set()
    gate = overrides.get("gate", loss_given.gate if isinstance(loss_given, PolicyLoss) else None)
    gate_fields = {f.name for f in fields(gate)} - clip_fields if is_dataclass(gate) else set()
    for key in overrides:
        if key not in algorithm_fields | loss_fields | clip_fields | gate_fields:
            known = algorithm_fields | loss_fields | clip_fields | gate_fields
            raise ValueError(choose(f"option of {name!r}", key, known, OTHER_NAMES))
    _check_types(overrides, chosen, loss_given, rule, gate)
    chosen = replace(chosen, **{k: v for k, v in overrides.items() if k in algorithm_fields})  # type: ignore[arg-type]
    changes = {k: v for k, v in overrides.items() if k in loss_fields}
    if "beta" in changes and changes.get("divergence", chosen.loss.divergence) == "none":
        if chosen.advantage.kind == "reward-to-go" or chosen.advantage.beta:  # its KL is in the reward
            chosen = replace(chosen, advantage=chosen.advantage.replace(beta=changes.pop("beta")))
        elif changes["beta"]:
            raise ValueError(
                f"beta has no effect on {name!r}, which has no KL term; give divergence='urkl' too, or "
                "advantage={'beta': …} for a KL in the reward"
            )
    if "beta" in changes and chosen.advantage.tau is not None:  # one temperature for both
        chosen = replace(chosen, advantage=chosen.advantage.replace(tau=changes["beta"]))
    if changes.get("divergence", "none") != "none" and not changes.get("beta", chosen.loss.beta):
        raise ValueError(f"divergence={changes['divergence']!r} needs a beta: {name!r} has none of its own")
    if changes.get("reduction", "constant") != "constant":
        changes.setdefault("constant", None)
    inner = {k: v for k, v in overrides.items() if k in clip_fields - loss_fields}
    if inner:
        changes["clip"] = replace(rule, **inner)  # type: ignore[type-var]
    inner = {k: v for k, v in overrides.items() if k in gate_fields - loss_fields}
    if inner:
        changes["gate"] = replace(gate, **inner)  # type: ignore[type-var]
    loss = chosen.loss.replace(**changes)
    same = loss == chosen.loss and chosen.advantage == _PRESETS[name]().advantage
    formula = chosen.formula if same else f"{chosen.formula} Changed: {', '.join(overrides)}."
    return replace(chosen, formula=formula, loss=loss)


def with_advantage(options: Mapping[str, object], published: Advantage) -> dict[str, object]:
    """Options of a preset with their advantage made: a kind, options of ``published``, or of another kind.

    A flag's ``advantage.beta`` is an option of it too.
    """
    out = {name: value for name, value in options.items() if not name.startswith("advantage.")}
    dotted = {name.removeprefix("advantage."): value for name, value in options.items() if name not in out}
    given = out.get("advantage")
    if given is None and not dotted:
        return out
    _check_types(dotted, published)
    if isinstance(given, Advantage):
        out["advantage"] = given.replace(**dotted)
        return out
    changes = {"kind": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else given
    if not isinstance(changes, dict | None):
        raise TypeError(f"advantage must be a kind, options by name, or an rpg.Advantage; got {given!r}")
    changes = (changes or {}) | dotted
    _check_types(changes, published)
    start = Advantage() if "kind" in changes else published
    out["advantage"] = start.replace(**changes)
    return out


def _check_types(options: Mapping[str, object], *parts: object) -> None:
    """Of the options that are numbers or switches: a flag's value may be any text."""
    kinds = {f.name: f.type for part in parts if is_dataclass(part) for f in fields(part)}
    for name, value in options.items():
        kind, _, optional = str(kinds.get(name)).partition(" | ")
        if value is None and optional:
            continue
        if kind == "float" and (not isinstance(value, numbers.Real) or isinstance(value, bool)):
            raise TypeError(f"{name} must be a number; got {value!r}")
        if kind == "bool" and not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false; got {value!r}")
