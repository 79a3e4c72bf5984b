"""What ``auto`` is for what is trained, what is recorded of it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpg.models import BUILTIN
from rpg.run.auto import announcement, objections, refuse_ruin, settled
from rpg.run.config import Config
from rpg.run.settings import build, change

QWEN = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "task.name": "gsm8k"}
THINKING = {"model": "Qwen/Qwen3-4B", "task.name": "gsm8k"}
SHAPE = {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 150_000, "max_position_embeddings": 1200}


def config(**values: Any) -> Config:
    return build(Config, flags={name.replace("__", "."): value for name, value in values.items()})


def of(values: dict[str, Any], **more: Any) -> tuple[float, int]:
    chosen = settled(change(Config(), {**values, **{name.replace("__", "."): x for name, x in more.items()}}))
    return chosen.optim.lr, chosen.rollout.max_new_tokens


def model_folder(path: Path, template: str = "", **shape: int) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE | shape))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


def test_what_is_trained_decides() -> None:
    assert of({}) == (5e-4, 80)
    assert of({"peft.method": "lora", "task.name": "countdown"}) == (5e-4, 80)
    assert of({"model": str(BUILTIN)}) == (5e-4, 80), "a checkpoint of the built-in model is one"
    assert of(QWEN) == (1e-6, 1024)
    assert of(QWEN, peft__method="lora") == (3e-5, 1024)
    assert of({"model": "someone/unknown", "task.name": "data.jsonl"}) == (1e-6, 1024)
    assert of(QWEN, task__name="0.7*math + 0.3*gsm8k") == (1e-6, 2048)
    assert of(QWEN, task__name="arithmetic", task__test="gsm8k, aime24") == (1e-6, 2048)
    assert of(QWEN, task__name="not a + + mixture") == (1e-6, 1024), "the task's mistake is told when it is loaded"


def test_models_that_think_get_room() -> None:
    assert of(THINKING) == (1e-6, 4096)
    assert of({"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}) == (1e-6, 4096)
    assert of({"model": "Qwen/Qwen3-4B-Base"}) == (1e-6, 1024)
    assert of({"model": "Qwen/Qwen3-4B-Instruct-2507"}) == (1e-6, 1024)
    assert of(THINKING, task__chat_options={"enable_thinking": False}) == (1e-6, 1024)
    assert of(THINKING, task__chat=False) == (1e-6, 1024)


def test_models_on_this_machine_are_looked_at(tmp_path: Path) -> None:
    long = {"max_position_embeddings": 32768}
    assert of({"model": model_folder(tmp_path / "plain", **long)}) == (1e-6, 1024)
    assert of({"model": model_folder(tmp_path / "thinks", "{{ '<think>' }}", **long)}) == (1e-6, 4096)
    assert of({"model": model_folder(tmp_path / "narrow")}) == (1e-6, 1200 - 512), "beside max_prompt_tokens"
    assert of({"model": model_folder(tmp_path / "tiny", hidden_size=64, num_hidden_layers=2)}) == (5e-4, 80)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for base, expected in ((tmp_path / "plain", (3e-5, 1024)), (BUILTIN, (5e-4, 80))):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        assert of({"model": str(adapter)}) == expected
    (tmp_path / "small.gguf").write_bytes(b"x")
    assert of({"model": str(tmp_path / "small.gguf")}) == (5e-4, 80)
    (tmp_path / "plain" / "config.json").write_text("[]")
    assert of({"model": str(tmp_path / "plain")}) == (1e-6, 1024), "loading it says what is wrong"


def test_what_is_given_stays_and_what_was_auto_is_said() -> None:
    given = config(model="Qwen/Qwen3-4B", optim__lr="3e-6", rollout__max_new_tokens="320")
    assert settled(given) == given
    assert announcement(given) == ""
    assert announcement(Config()) == "lr 0.0005, responses of up to 80 tokens (auto: the built-in model)"
    assert announcement(change(Config(), THINKING)) == (
        "lr 1e-06 (auto: all weights of a pretrained model), responses of up to 4,096 tokens "
        "(auto: Qwen3-4B thinks before it answers)"
    )
    assert "(auto: gsm8k)" in announcement(change(Config(), QWEN))


def test_auto_survives_a_change_of_the_model_and_is_checked_once_it_is_known() -> None:
    assert change(Config(), {"model": "x"}).optim.lr == "auto"
    assert config(optim__lr="AUTO").optim.lr == "auto"
    with pytest.raises(ValueError, match=r"^rollout.overlong_tokens must be at most max_new_tokens, 80; got 81$"):
        settled(config(rollout__overlong="true", rollout__overlong_tokens="81"))


@pytest.mark.parametrize(
    ("values", "text", "fatal"),
    [
        ({**QWEN, "optim.lr": 5e-4}, "optim.lr 0.0005 on all weights of a pretrained model ruins it: 1e-06 is", True),
        ({**QWEN, "optim.lr": 5e-4, "insist": True}, "ruins it", False),
        ({**QWEN, "optim.lr": 3e-5}, "is high: 1e-06 is usual", False),
        ({**QWEN, "optim.lr": 5e-6}, None, False),
        ({**QWEN, "peft.method": "lora", "optim.lr": 5e-4}, None, False),
        ({**QWEN, "peft.method": "lora", "optim.lr": 2e-3}, "on an adapter is high", False),
        ({**QWEN, "peft.method": "lora", "optim.lr": 0.05}, "on an adapter ruins it", True),
        ({"optim.lr": 1.0}, None, False),
        ({**QWEN, "rollout.max_new_tokens": 80}, "max_new_tokens 80 cuts nearly every response before its ans", False),
        ({**QWEN, "rollout.max_new_tokens": 320}, None, False),
        ({**THINKING, "rollout.max_new_tokens": 320}, "or --task.chat_options.enable_thinking false", False),
        ({"model": "someone/unknown", "rollout.max_new_tokens": 8}, None, False),  # of a task that may want a word
    ],
)
def test_what_would_spoil_a_run(values: dict[str, Any], text: str | None, fatal: bool) -> None:
    asked = settled(change(Config(), values))
    found = list(objections(asked))
    assert [one.fatal for one in found] == ([] if text is None else [fatal])
    assert text is None or text in found[0].text
    if fatal:
        with pytest.raises(ValueError, match=r"ruins it.*give --insist"):
            refuse_ruin(asked)
        refuse_ruin(replace(asked, insist=True))
    else:
        refuse_ruin(asked)
