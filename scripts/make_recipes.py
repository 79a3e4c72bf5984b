"""Write recipes/paper and recipes/gsm8k: each file complete, with what it reproduces in its first lines.

    python scripts/make_recipes.py            # tests/test_recipes.py checks that the files are what this makes

Facts of the paper: arXiv 2505.17508 in its ICLR 2026 version, section 5, appendices H and I.2 and tables 3, 5, 6, 7
and 8; where it is silent, the authors' scripts (github.com/complex-reasoning/RPG, recipe/rpg/7b), which are of
Qwen2.5-7B at 2K.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import rpg

ROOT = Path(__file__).parents[1]
RPG = [f"rpg-{kind}{divergence}" for kind in ("", "reinforce-") for divergence in ("fkl", "rkl", "ufkl", "urkl")]
METHODS = [*RPG, "grpo", "dapo", "reinforce++", "reinforce++-baseline"]
Row = tuple[float, ...]  # Last and Best of each test


@dataclass(frozen=True)
class Setting:
    folder: str
    model: str
    title: str
    response: int  # tokens
    table: str
    tests: tuple[str, ...]
    rows: dict[str, Row]
    notes: tuple[str, ...] = ()
    more: tuple[str, tuple[str, ...], dict[str, Row]] | None = None  # a second table: its name, tests and rows


@dataclass(frozen=True)
class Ablation:
    """One curve of a figure in appendix I.2: a method of a setting, with some settings changed."""

    name: str
    setting: str
    method: str
    figure: str
    title: str
    loss: str
    reference: str = "old"


AIME = ("AIME24", "AIME25")
SETTINGS = (
    Setting(
        "qwen3-4b-2k",
        "Qwen/Qwen3-4B",
        "Qwen3-4B, 2K context",
        2048,
        "Table 6",
        AIME,
        {
            "grpo": (0.2563, 0.2708, 0.2323, 0.2479),
            "dapo": (0.3229, 0.3281, 0.2792, 0.2844),
            "rpg-ufkl": (0.3427, 0.3479, 0.2833, 0.2833),
            "rpg-urkl": (0.3260, 0.3594, 0.2677, 0.2677),
            "rpg-reinforce-ufkl": (0.3396, 0.3625, 0.2927, 0.3083),
            "rpg-reinforce-urkl": (0.3188, 0.3417, 0.2792, 0.2938),
        },
    ),
    Setting(
        "qwen3-4b-4k",
        "Qwen/Qwen3-4B",
        "Qwen3-4B, 4K context",
        4096,
        "Table 5",
        (*AIME, "AMC23"),
        {
            "reinforce++-baseline": (0.3854, 0.4302, 0.3406, 0.3844, 0.9234, 0.9328),
            "reinforce++": (0.3490, 0.3885, 0.2822, 0.3479, 0.8977, 0.9297),
            "grpo": (0.3458, 0.3677, 0.2896, 0.3042, 0.9016, 0.9109),
            "dapo": (0.4063, 0.4479, 0.3510, 0.3938, 0.9297, 0.9297),
            "rpg-ufkl": (0.4031, 0.4396, 0.3625, 0.3979, 0.9477, 0.9500),
            "rpg-urkl": (0.3990, 0.4219, 0.3438, 0.3792, 0.9500, 0.9531),
            "rpg-reinforce-ufkl": (0.4281, 0.4375, 0.3771, 0.4042, 0.9023, 0.9133),
            "rpg-reinforce-urkl": (0.4458, 0.4531, 0.4125, 0.4313, 0.9313, 0.9352),
        },
        more=(
            "Table 7",
            ("Minerva-Math", "OlympiadBench"),
            {
                "reinforce++-baseline": (0.1250, 0.1471, 0.4926, 0.5875),
                "reinforce++": (0.1691, 0.1728, 0.4778, 0.6202),
                "grpo": (0.1029, 0.1177, 0.4926, 0.5594),
                "dapo": (0.0993, 0.1507, 0.5163, 0.5727),
                "rpg-ufkl": (0.1397, 0.2059, 0.4688, 0.5564),
                "rpg-urkl": (0.1654, 0.1654, 0.4837, 0.5801),
                "rpg-reinforce-ufkl": (0.1360, 0.1434, 0.5074, 0.5564),
                "rpg-reinforce-urkl": (0.1140, 0.1434, 0.4674, 0.5816),
            },
        ),
    ),
    Setting(
        "qwen3-4b-8k",
        "Qwen/Qwen3-4B",
        "Qwen3-4B, 8K context",
        8192,
        "Table 3",
        (*AIME, "AMC23"),
        {
            "grpo": (0.3750, 0.4396, 0.3354, 0.4063, 0.9109, 0.9297),
            "dapo": (0.5438, 0.5740, 0.4469, 0.4740, 0.9375, 0.9430),
            "rpg-ufkl": (0.5938, 0.6177, 0.4698, 0.4865, 0.9492, 0.9517),
            "rpg-urkl": (0.4542, 0.5260, 0.5261, 0.4938, 0.9406, 0.9539),  # AIME25: Last above Best, as printed
            "rpg-reinforce-ufkl": (0.5906, 0.5958, 0.4833, 0.5031, 0.9453, 0.9469),
            "rpg-reinforce-urkl": (0.5708, 0.5781, 0.5073, 0.5208, 0.9398, 0.9469),
        },
    ),
    Setting(
        "qwen2.5-7b-instruct",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen2.5-7B-Instruct, 2K context",
        2048,
        "Table 8",
        ("AMC23", *AIME),
        {
            "grpo": (0.6266, 0.7250, 0.1094, 0.1406, 0.0281, 0.0948),
            "reinforce++": (0.7625, 0.7664, 0.0521, 0.1177, 0.0302, 0.0740),
            "reinforce++-baseline": (0.8711, 0.8711, 0.0990, 0.1510, 0.0656, 0.0969),
            "dapo": (0.8039, 0.8734, 0.0760, 0.1240, 0.0531, 0.1063),
            "rpg-fkl": (0.8695, 0.8836, 0.1083, 0.1490, 0.0427, 0.1083),
            "rpg-rkl": (0.8648, 0.8672, 0.1167, 0.1469, 0.0677, 0.1240),
            "rpg-ufkl": (0.8703, 0.8703, 0.0885, 0.1427, 0.0927, 0.1177),
            "rpg-urkl": (0.8258, 0.8641, 0.0875, 0.1271, 0.0677, 0.0917),
            "rpg-reinforce-fkl": (0.8727, 0.8727, 0.1208, 0.1667, 0.0573, 0.0875),
            "rpg-reinforce-rkl": (0.8305, 0.8516, 0.1125, 0.1375, 0.0490, 0.0875),
            "rpg-reinforce-ufkl": (0.8391, 0.8602, 0.1229, 0.1458, 0.0740, 0.0979),
            "rpg-reinforce-urkl": (0.8531, 0.8531, 0.1208, 0.1500, 0.0813, 0.0938),
        },
        (
            "The table does not name the context; the authors' scripts for this model say 2K.",
            "Does not fit one H200: 20 bytes a parameter are 152 GB. Give --peft.method lora, or take several GPUs,",
            "with the same loss in TRL or verl.",
        ),
    ),
)

CLIP = """\
loss:
  low: 0.1                  # the ablation: (0.1, 0.1) in place of (0.2, 0.28)
  high: 0.1
"""
BETA = """\
loss:
  beta: 1.0e-3              # the ablation: in place of 1e-4
"""
ABLATIONS = (
    *(
        Ablation(f"{method}-clip-0.1", "qwen3-4b-2k", method, "Figure 8", "clip (0.1, 0.1)", CLIP)
        for method in ("rpg-reinforce-ufkl", "rpg-reinforce-urkl")
    ),
    Ablation("rpg-reinforce-ufkl-beta-1e-3", "qwen3-4b-4k", "rpg-reinforce-ufkl", "Figure 9", "β = 1e-3", BETA),
    Ablation(
        "rpg-reinforce-ufkl-beta-1e-3-frozen",
        "qwen3-4b-4k",
        "rpg-reinforce-ufkl",
        "Figure 9",
        "β = 1e-3, no iterative reference",
        BETA,
        "frozen",
    ),
)

# what a method needs besides its preset; comments say why
LOSS = {
    "grpo": """\
loss:
  beta: 1.0e-4              # appendix H, for all methods (the authors' script: 1e-3; the preset has GRPO's own 0.04)
  low: 0.2                  # section 5; appendix H says (0.1, 0.1)
  high: 0.2
  reduction: token-mean     # the authors' script; as published GRPO takes the mean of a response first
""",
    "reinforce++": """\
loss:
  divergence: k1            # the authors' script has its KL in the loss, as k1, which has no signal on-policy
  beta: 1.0e-4              # appendix H
  high: 0.28                # the authors' script
  advantage:
    beta: 0.0               # none in the reward: it would be 0, since the reference is the sampling policy
""",
    "reinforce++-baseline": """\
loss:
  divergence: k1            # the authors' script has k1 in place of the preset's k2; k1 has no signal on-policy
  beta: 1.0e-4              # appendix H
  high: 0.28                # the authors' script
""",
}
TITLES = {"reinforce++": "REINFORCE++", "reinforce++-baseline": "REINFORCE++-Baseline"}


def title(method: str) -> str:
    return TITLES.get(method, method.upper())


def published(setting: Setting, method: str) -> str:
    """The row's numbers in one line, or that there is none."""
    if method not in setting.rows:
        return f"{setting.table} has no row {title(method)}: there is no published number to compare with"
    numbers = _numbers(setting.tests, setting.rows[method])
    return f"{setting.table}, row {title(method)}, Last / Best: {numbers}"


def _numbers(tests: tuple[str, ...], row: Row) -> str:
    return ", ".join(f"{t} {last:.4f} / {best:.4f}" for t, last, best in zip(tests, row[::2], row[1::2], strict=True))


def published_beside(setting: Setting, method: str) -> list[str]:
    """The same of the second table, if there is one and it has the row."""
    if setting.more is None or method not in setting.more[2]:
        return []
    table, tests, rows = setting.more
    return [f"{table}, Last / Best: {_numbers(tests, rows[method])}"]


def paper(setting: Setting, method: str, ablation: Ablation | None = None) -> str:
    """One file of the paper's experiment."""
    stem = f"{setting.folder}/{method}" if ablation is None else f"ablations/{ablation.name}"
    name = f"recipes/paper/{stem}.yaml"
    preset = rpg.algorithm(method)
    reference = {"grpo": "frozen", "dapo": None}.get(method, "old") if ablation is None else ablation.reference
    why = "the authors' script: the initial model" if ablation is None else "the ablation: the initial model throughout"
    seven = "7b" in setting.folder and "reinforce-" in method
    slower = "                # appendix H; the authors' script for this row has 5e-7" if seven else ""
    zone = "the authors' scripts" if setting.response == 2048 else "a quarter, as in the authors' scripts at 2K"
    about = [published(setting, method), *published_beside(setting, method)]
    if ablation is not None:
        about = [f"Appendix I.2, {ablation.figure}: curves alone, there is no published number to compare with"]
    tests = "aime24, aime25, amc23" + (", minerva-math, olympiadbench" if setting.more and ablation is None else "")
    problems = "  problems: 674             # all of OlympiadBench\n" if "olympiad" in tests else ""
    changed = "" if ablation is None else f", {ablation.title}"
    lines = [
        f"{title(method)}, {setting.title}{changed}: arXiv 2505.17508 (ICLR 2026)",
        *about,
        f"rpg train --config {name}",
        f"rpg train --config {name} --dry-run h200",
        preset.formula,
        *setting.notes,
    ]
    context = f'"{setting.response // 1024}K context" is the response; prompt and response are twice that (appendix H)'
    head = "".join(f"# {line}\n" for line in lines)
    sampling = f"""\
  dynamic: true
  max_rounds: 20            # the authors' scripts
  overlong: true
  overlong_tokens: {setting.response // 4:<9}# {zone}
"""
    if method == "grpo":
        sampling = "  dynamic: false            # the authors' script\n  overlong: false           # likewise\n"
    anchor = {
        "old": "reference:\n  update: old               # the policy of the last iteration\n",
        "frozen": f"reference:\n  update: frozen            # {why}\n",
        None: "",
    }[reference]
    return f"""{head}
algorithm: {method}
model: {setting.model}
output: runs/paper/{stem}
steps: 400
{LOSS.get(method, "") if ablation is None else ablation.loss}task:
  name: dapo-math-17k-en    # the paper counts 13.9k English problems
  test: {tests}
  template: answer            # the test sets too, where they come from the hub as they are
  rewards:
    correct: 2.0            # the authors' rewards are 1 and -1: the span counts, the constant cancels
rollout:
  prompts: 512
  samples: 16
  max_prompt_tokens: 2048   # the authors' scripts
  max_new_tokens: {setting.response:<10}# {context}
  temperature: 1.0
{sampling}{anchor}optim:
  name: adamw
  lr: 1.0e-6{slower}
  schedule: constant
  warmup: 160               # 10 steps of 16 optimiser steps
  betas: [0.9, 0.999]       # verl's
  weight_decay: 0.1
  max_grad_norm: 1.0
  minibatches: 16           # of 32 prompts
eval:
  every: 10
{problems}  k: 32                     # mean@32
  temperature: 1.0
checkpoint:
  every: 20
  keep: 1
"""


GSM8K = ("rpg-reinforce-urkl", "rpg-urkl", "rpg-reinforce-ufkl", "grpo", "dapo")


MINUTES = 3.0  # of each run in docs/gsm8k.md


def gsm8k(method: str) -> str:
    """One GPU, a small model."""
    name = f"recipes/gsm8k/qwen2.5-coder-0.5b/{method}.yaml"
    preset = rpg.algorithm(method)
    return f"""\
# {method} ({preset.paper}) on GSM8K with a model of 0.5B parameters, on one GPU
# rpg train --config {name}
# rpg train --config {name} --model FOLDER
# {preset.formula}

algorithm: {method}
model: Qwen/Qwen2.5-Coder-0.5B-Instruct
output: runs/gsm8k/{method}
steps: 10000
minutes: {MINUTES}                # the same for every method; evaluations are not counted
task:
  name: gsm8k                 # 7,473 problems; evaluated on all 1,319 of its test split
rollout:
  prompts: 64
  samples: 8
  max_new_tokens: 320
  oversample: 1.1             # 121 of 1.7 × 64 groups: all their responses fit into 1,024 slots
  overlong: false             # at 320 tokens the zone of the penalty would lie on the mean length
optim:
  lr: 3.0e-6
  schedule: constant
  warmup: 8
  minibatches: 2              # of 32 prompts
eval:
  every: 20
  problems: 1319
  k: 2
checkpoint:
  every: 0
  keep: 1
"""


def recipes() -> dict[Path, str]:
    """Text by path below the repository."""
    made = {Path(f"recipes/paper/{s.folder}/{method}.yaml"): paper(s, method) for s in SETTINGS for method in METHODS}
    by_folder = {setting.folder: setting for setting in SETTINGS}
    made |= {
        Path(f"recipes/paper/ablations/{a.name}.yaml"): paper(by_folder[a.setting], a.method, a) for a in ABLATIONS
    }
    return made | {Path(f"recipes/gsm8k/qwen2.5-coder-0.5b/{method}.yaml"): gsm8k(method) for method in GSM8K}


if __name__ == "__main__":
    for path, text in recipes().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    print(f"wrote {len(recipes())} recipes")
