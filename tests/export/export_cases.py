"""Recipes and variants that rpg export is tried on."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import rpg
from rpg.export import verl
from rpg.export.start import Start
from rpg.run.config import Config
from rpg.run.settings import build

ROOT = Path(__file__).parents[2]
RECIPES = {str(p.relative_to(ROOT / "recipes")): p for p in sorted((ROOT / "recipes").rglob("*.yaml"))}
REFUSED = {"builtin/remax.yaml": "greedy", "builtin/warp.yaml": "reference.update=ema"} | {
    f"builtin/{name}.yaml": why for name in rpg.algorithms() if (why := rpg.algorithm(name).only_here)
}
FOLDER = "/data/a folder"
ADAPTER = {"peft.method": "lora", "peft.options.r": "4"}  # verl looks at vLLM for it, which need not be there
VARIANTS = {
    "everything": {
        "rollout.engine": "vllm",
        "rollout.vllm.gpu_memory_utilization": "0.4",
        "rollout.vllm.swap_space": "2",
        "rollout.slots": 64,
        "rollout.top_k": 20,
        "rollout.top_p": 0.9,
        "rollout.old_logp": "engine",
        "task.chat": "true",
        "task.chat_options.enable_thinking": "false",
        "model_options.trust_remote_code": "true",
        "optim.schedule": "cosine",
        "optim.epochs": 2,
        "optim.max_grad_norm": float("inf"),
        "log.wandb": "it's a project: {1}, [2]",
        "dtype": "float32",
        "eval.temperature": 0.0,
        "checkpoint.keep": 0,
    },
    "reference": {"reference.update": "every", "reference.every": 7, "loss.beta": "1e-3", "loss.mismatch": "tis"},
    "reference by kl": {"reference.update": "kl", "reference.kl": 0.1},
}


def recipe(name="builtin/rpg-urkl.yaml", **flags):
    return build(Config, file=RECIPES[name], flags=flags)


def where(**settings):
    usual = {"folder": FOLDER, "chat": False, "gpus": 4, "nodes": 2}
    return verl.VerlLaunch(Start("/models/a model"), **(usual | settings))


@functools.cache
def configs():
    found = {name: recipe(name) for name in RECIPES if name not in REFUSED}
    return found | {name: recipe(**flags) for name, flags in VARIANTS.items()}


def verl_python():
    """Of verl's environment."""
    python = os.environ.get("RPG_VERL_PYTHON")
    if not python:
        pytest.skip("RPG_VERL_PYTHON does not name an interpreter that has verl")
    return python


def tree(settings):
    """Settings by their full names as the config that they make."""
    found = {}
    for name, value in settings.items():
        *path, last = name.removeprefix("+").split(".")
        part = functools.reduce(lambda one, key: one.setdefault(key, {}), path, found)
        part[last] = dict(value) if isinstance(value, Mapping) else value
    return found
