"""The JavaScript of the page: the library's own definitions, translated, behind the runtime that they need."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.resources import files

from ..loss import clip, inputs, objective, policy_loss, terms
from . import sample, words
from .javascript import translate

LIMITS = ("INF", "Limits", "Seen", "Clip", "_inside", "_check_low_high", "_check_dual", "_range", "lambert_w")
RULES = ("Box", "DualClip", "RPGClip", "KL3", "TrustRegion", "Truncate", "Unweighted", "Taper", "LogBox", "Sigmoid",
         "SoftWeight")  # fmt: skip
SMALL = ("KL3_FORMS", "MEASURES", "_binary_kl")
# of PolicyLoss: what it refuses, where its KL term stands, and the batch as its level sees it
METHODS = (
    "__post_init__",
    "_check_parts",
    "has_kl",
    "kl_inside",
    "_can_hold_kl",
    "_published_inside",
    "kl_place",
    "_terms",
)
WORDS = ("ENDLESS", "K3", "FAR", "code", "rule_code", "reduction_code", "inside_code", "clamp_code", "left_code",
         "reinforce_code", "differentiable_code", "formula", "rule_lines", "ends")  # fmt: skip


def script() -> str:
    """The loss in JavaScript."""
    return "\n".join(
        [
            read("runtime.js"),
            translate(objective, "LEVELS", "Ratios", "Divergence", "DIVERGENCES", "bounded", "at_level"),
            translate(clip, *LIMITS, *SMALL, *RULES),
            translate(terms, "KL_PLACES", "Terms"),
            translate(inputs, "Inputs", only=["log_ratio"]),
            translate(policy_loss, "ESTIMATORS", "REDUCTIONS", "_NEEDED", "PolicyLoss", only=METHODS),
            translate(sample, "sample", "loss_of", "weight_of", "fate_of", "sentence"),
            translate(words, *WORDS),
            f"const RULES = {{ {', '.join(RULES)} }};",
        ]
    )


def read(name: str, package: str = __package__ or "") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def expressions() -> dict[str, dict[str, str]]:
    """Each divergence's value, weight and weight by ratio as they stand in ``DIVERGENCES``, without the ``r.``"""
    tree = ast.parse(inspect.getsource(objective))
    (table,) = (n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "DIVERGENCES")
    assert isinstance(table, ast.Dict)
    texts = {"none": {"value": "", "weight": "", "per_ratio": ""}}
    for key, row in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant)
        assert isinstance(row, ast.Call)
        lambdas = {k.arg: k.value.body for k in row.keywords if isinstance(k.value, ast.Lambda)}
        found = {str(name): _plain(ast.unparse(body)) for name, body in lambdas.items()}
        texts[str(key.value)] = {"per_ratio": f"({found['weight']}) / w", **found}
    return texts


def _plain(text: str) -> str:
    for name in ("w", "log_u", "logp", "v"):
        text = text.replace(f"r.{name}", name)
    text = text.replace("r.ref_over_pi_less_1", "torch.expm1(-log_u)")
    return text.replace(" + torch.zeros_like(w)", "").replace("-torch.ones_like(w)", "-1")


def formulas() -> dict[str, dict[str, dict[str, str]]]:
    """The same as a reader would write them, with the ratio's letter at each level."""
    signs = {
        "torch.expm1(-log_u)": "ref/π − 1", "log_u.square() / 2": "(log u)²/2", "log_u.abs()": "|log u|",
        "log_u.sign()": "sign(log u)", "log_u": "log u", "logp": "log π", " * ": "·", "-": "−", " / ": "/",
    }  # fmt: skip

    def written(text: str, letter: str) -> str:
        for old, new in signs.items():
            text = text.replace(old, new)
        return re.sub(r"\bw\b", letter, text)

    return {
        level: {
            divergence: {name: written(text, letter) for name, text in row.items()}
            for divergence, row in expressions().items()
        }
        for level, letter in zip(objective.LEVELS, "wWS", strict=True)
    }
