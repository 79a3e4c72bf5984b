"""The plan of a run whose frozen base is held in 4 bits."""

from dataclasses import replace

from rpg.plan.plan import plan
from rpg.plan.table import show
from rpg.run.config import Config, OptimConfig, PeftConfig, RolloutConfig

PARAMETERS = 7_615_616_512  # of Qwen2.5-7B


def test_a_7b_model_in_4_bits_fits_a_card_of_24_gb():
    long = RolloutConfig(max_prompt_tokens=512, max_new_tokens=1024)
    config = Config(model="Qwen/Qwen2.5-7B-Instruct", rollout=long, peft=PeftConfig("lora", {"r": 16}, 4))
    found = plan(config, "rtx4090")
    assert found.fits
    body = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    assert found.packed == body
    assert found.parameters == PARAMETERS
    rest = PARAMETERS - body
    assert found.memory.weights == body * 17 // 32 + 2 * (rest + found.trained)
    assert found.memory.dense == 2 * 3584 * 18944
    assert not plan(replace(config, peft=PeftConfig("lora", {"r": 16})), "rtx4090").fits


def test_4_bits_cost_time_where_the_weights_are_made_dense():
    """On the same card with the same rows: in a training pass, and more in a decoding step, which has few rows."""
    long = RolloutConfig(slots=32, prompts=4, samples=8, max_prompt_tokens=512, max_new_tokens=256, overlong_tokens=64)
    base = Config(model="Qwen/Qwen2.5-7B-Instruct", rollout=long, optim=OptimConfig(micro_tokens=4096, recompute=True))
    dense, packed = (
        plan(replace(base, peft=PeftConfig("lora", {}, bits)), "h200").middle.seconds for bits in (None, 4)
    )
    assert dense.train < packed.train < 1.5 * dense.train
    assert 1.5 * dense.rollout < packed.rollout


def test_the_plan_names_what_is_in_4_bits(capsys):
    show(plan(Config(model="Qwen/Qwen3-4B", peft=PeftConfig("lora", {}, 4)), "rtx4090"))
    out = " ".join(capsys.readouterr().out.split())
    assert "3.63 B of them frozen in 4 bits" in out
    assert "the largest matrix in 4 bits, while it is multiplied" in out
    show(plan(Config(model="Qwen/Qwen3-4B", peft=PeftConfig("lora")), "h200"))
    assert "dense" not in capsys.readouterr().out.partition("memory, GB")[2].partition("together")[0]
