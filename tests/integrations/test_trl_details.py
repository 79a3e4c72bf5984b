"""Small things that a training with RPGTrainer must get right: each of them once."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import tiny

pytest.importorskip("trl")

from transformers import TrainerCallback

from integrations.trl_small import history, lora, prompts, trainer, weights
from rpg.integrations.trl.reference import TRLReference
from rpg.integrations.trl.scores import GenerationScores
from rpg.integrations.trl.trainer import StepMeans
from rpg.loss.advantages import Advantage
from rpg.run.config import ReferenceConfig

# ---- optimiser steps -------------------------------------------------------------------------------------------------


def test_a_short_window_of_an_iterable_dataset_leaves_nothing(tmp_path):
    """3 micro-batches an epoch, 2 to an optimiser step: Trainer makes no step of the third."""
    left, tokens = [], []

    class Begin(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            left.append([p.grad for p in made.model.parameters() if p.grad is not None])
            tokens.append(made._means.weights.get("entropy", 0.0))

    made = trainer(
        tmp_path,
        algorithm="rloo",
        dataset=prompts(12).to_iterable_dataset(),
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_steps=3,
        more={"callbacks": [Begin()]},
    )
    made.train()
    assert made._step == 8  # 2 were of no step
    assert left == [[]] * 5
    assert tokens == [0] * 5


def test_a_micro_batch_of_no_step_is_refused(tmp_path):
    made = trainer(tmp_path)
    made.model.train()
    with pytest.raises(RuntimeError, match=r"a micro-batch of no optimiser step: .*; train with trainer.train\(\)"):
        made._prepare_inputs([{"prompt": "w3"}] * 16)


def test_nothing_learnt_in_half_precision(tmp_path, caplog):
    """A scaler wants to have seen gradients before they are taken away: Trainer measures them, clipped or not."""
    made = trainer(tmp_path, algorithm="dapo", fp16=True, max_grad_norm=0.0, reward=_ones, max_steps=2)
    made.accelerator.native_amp, made.accelerator.scaler = True, torch.amp.GradScaler("cpu")  # as on a GPU
    before = weights(made.model)
    made.train()
    assert all(torch.equal(x, before[name]) for name, x in weights(made.model).items())
    assert "step 2: no group had unequal rewards; nothing learnt" in caplog.text


def _ones(completions, **_):
    return [1.0] * len(completions)


def _cut(prompts, trainer):
    """Responses of full length."""
    responses = [[4 + (i + t) % 30 for t in range(6)] for i in range(len(prompts))]
    return {"prompt_ids": [[3]] * len(prompts), "completion_ids": responses, "logprobs": None}


@pytest.mark.parametrize(("name", "options"), [("reinforce++", {"beta": 0.1}), ("rloo", {}), ("dapo", {})])
def test_every_response_was_cut(tmp_path, caplog, name, options):
    """And masked: there is no token to whiten, no response to train on."""
    made = trainer(
        tmp_path,
        algorithm=name,
        loss=options,
        mask_truncated_completions=True,
        max_steps=2,
        more={"rollout_func": _cut},
    )
    before = weights(made.model)
    made.train()
    assert history(made, "reward_std")[0] > 0
    assert history(made, "loss") == [0, 0]
    assert all(torch.equal(x, before[name]) for name, x in weights(made.model).items())
    assert "step 1: no response is left to train on; nothing learnt" in caplog.text


def test_responses_without_tokens_are_not_whitened():
    mask_NT = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    scores = GenerationScores(torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.zeros(4), torch.arange(4) // 2)
    rule = Advantage("reward-to-go", whiten=True)
    advantage_NT, keep_N = scores.advantages(rule, dynamic=False, mask=mask_NT)
    assert keep_N.tolist() == [True, False, True, False]
    assert float(advantage_NT[mask_NT].sum()) == pytest.approx(0, abs=1e-6)
    for left in (0, 1):  # none, or one response of one token
        mask_NT = torch.zeros(4, 2, dtype=torch.bool)
        mask_NT[:left, 0] = True
        advantage_NT, keep_N = scores.advantages(rule, dynamic=False, mask=mask_NT)
        assert not keep_N.any()
        assert not advantage_NT.any()


def test_sums_of_rewards_are_equal_but_for_rounding():
    reward_N = torch.tensor([0.1, 0.7]) + torch.tensor([0.7, 0.1]) + torch.tensor([0.2, 0.2])
    reward_N = torch.stack([reward_N[0], torch.nextafter(reward_N[1], torch.tensor(2.0))])
    assert reward_N[0] != reward_N[1]
    scores = GenerationScores(reward_N, torch.zeros(2), torch.zeros(2, dtype=torch.long))
    assert not scores.advantages(Advantage("group-mean"), dynamic=True)[1].any()


def test_a_router_loss_is_a_mean_over_micro_batches(tmp_path):
    """Rewards are equal: the router's is all of the loss."""
    model = tiny.make(config="MixtralConfig", num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1)
    made = trainer(
        tmp_path, model, algorithm="rloo", reward=_ones, per_device_train_batch_size=4, gradient_accumulation_steps=4,
        max_steps=1,
    )  # fmt: skip
    assert made.aux_loss_enabled
    made.train()
    assert history(made, "loss")[0] == pytest.approx(0.1 * history(made, "aux_loss")[0], rel=1e-3)
    assert history(made, "aux_loss")[0] > 1


# ---- metrics, table, card --------------------------------------------------------------------------------------------


def test_metrics_are_weighted_by_tokens():
    means = StepMeans(Accelerator(cpu=True))
    for tokens, value in ((10.0, 1.0), (30.0, 2.0), (0.0, torch.nan)):
        found = {"tokens": tokens, "sequences": 2.0, "ess": value, "ratio/max": value, "kl/old": value}
        means.add({name: torch.tensor(x) for name, x in found.items()})
    assert means.take() == {"ess": 1.75, "ratio/max": 2.0, "kl/old": 1.75}
    assert means.take() == {}


def _fixed(prompts, trainer):
    """Responses of 1, 2, 3 and 4 tokens to every prompt."""
    responses = [[7] * (1 + i % 4) for i in range(len(prompts))]
    return {"prompt_ids": [[3]] * len(prompts), "completion_ids": responses, "logprobs": None}


def _shortest(completion_ids, **_):
    return [float(len(ids) == 1) for ids in completion_ids]


@pytest.mark.parametrize(("name", "first"), [("rloo", 1.0), ("dr-grpo", 0.75)])
def test_the_table_has_the_advantages_of_the_method(tmp_path, name, first):
    made = trainer(tmp_path, algorithm=name, reward=_shortest, max_steps=1, more={"rollout_func": _fixed})
    made.train()
    assert list(made._logs["advantages"]) == pytest.approx([first, *[-first / 3] * 3] * 4)


def test_the_table_of_an_evaluation_has_them_once(tmp_path):
    rows = {"rollout_func": _fixed, "eval_dataset": Dataset.from_dict({"prompt": ["w3", "w4"]})}
    made = trainer(tmp_path, algorithm="rloo", reward=_shortest, per_device_eval_batch_size=4, more=rows)
    made.evaluate()
    assert list(made._logs["advantages"]) == pytest.approx([1.0, *[-1 / 3] * 3] * 2)


def test_an_evaluation_is_divided_by_its_own_tokens(tmp_path):
    """On-policy the loss is −Σ length × advantage / Σ length, whatever the last optimiser step held."""
    made = trainer(
        tmp_path,
        algorithm="dr-grpo",
        loss={"reduction": "token-mean"},
        reward=_shortest,
        max_steps=1,
        per_device_eval_batch_size=4,
        more={"rollout_func": _fixed, "eval_dataset": Dataset.from_dict({"prompt": ["w3", "w4"]})},
    )
    made.train()
    assert made.evaluate()["eval_loss"] == pytest.approx(-(0.75 - 0.25 * 9) / 10, abs=1e-5)


@pytest.mark.parametrize(("name", "arxiv"), [("grpo", "2402.03300"), ("dapo", "2503.14476"), ("reinforce", None)])
def test_the_model_card_names_the_method(tmp_path, name, arxiv):
    made = trainer(tmp_path, algorithm=name)
    made.create_model_card("small")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    linked = f", a method introduced in [arXiv {arxiv}](https://huggingface.co/papers/{arxiv})" if arxiv else ""
    assert f"This model was trained with {name}{linked}." in card


# ---- references ------------------------------------------------------------------------------------------------------


def test_a_moving_average_in_half_precision_moves(tmp_path):
    """Steps of 2e-5 of a weight: lost in bfloat16, kept in float32, also over a checkpoint."""
    model = tiny.make("llama", dtype=torch.bfloat16)
    references = [
        TRLReference(model, "ema", ReferenceConfig(update="ema", decay=0.98), adapted=False) for _ in range(2)
    ]
    with torch.no_grad():
        for reference in references:
            reference.copy.lm_head.weight.fill_(1.0)
            reference.averages["lm_head.weight"].fill_(1.0)
        model.lm_head.weight.fill_(1.0625)
    for step in range(200):
        references[0].after_step(step, None, True)
        references[1].after_step(step, None, True)
        if step == 100:
            references[0].save(tmp_path)
            references[1] = TRLReference(model, "ema", ReferenceConfig(update="ema", decay=0.98), adapted=False)
            references[1].load(tmp_path)
    for reference in references:
        average = reference.averages["lm_head.weight"]
        assert average.dtype == torch.float32
        assert float(average[0, 0]) == pytest.approx(1.0625 - 0.0625 * 0.98**200, rel=1e-5)
        assert torch.equal(reference.copy.lm_head.weight, average.bfloat16())


@pytest.mark.parametrize("rule", ["every", "frozen"])
def test_the_reference_of_an_adapter_has_no_dropout(tmp_path, rule):
    """Of the responses twice, the policy's log-probabilities differ by what was dropped, the reference's do not."""
    made = trainer(tmp_path, lora(lora_dropout=0.5), algorithm="grpo", reference_update=rule, max_steps=1)
    if rule == "every":  # an adapter that does something
        for name, x in made.reference.weights().items():
            x.fill_(0.1) if "lora_B" in name else None
    made.train()
    batch = made._buffered_inputs[0]
    made.model.train()
    modes = [module.training for module in made.model.modules()]
    with torch.no_grad():
        again_BT = made._score(made.ref_model, batch)[0]
        dropped_BT = [made._score(made.model, batch)[0] for _ in range(2)]
    mask_BT = batch["completion_mask"].bool()
    assert torch.equal(batch["ref_per_token_logps"][mask_BT], again_BT[mask_BT])
    assert not torch.equal(dropped_BT[0], dropped_BT[1])
    assert [module.training for module in made.model.modules()] == modes


# ---- tools -----------------------------------------------------------------------------------------------------------

CALL = '<call>{"name":"look","arguments":{}}</call>'
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {{ m.content }}"
    "{% for c in m.tool_calls or [] %} <call>{{ c.function | tojson }}</call>{% endfor %} <eos> "
    "{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def calling_tokenizer():
    """One of its words is a whole call."""
    words = {"<pad>": 0, "<eos>": 1, "<assistant>": 2, CALL: 3} | {f"w{i}": i for i in range(4, tiny.VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    made.chat_template, made.response_template = CHAT, RESPONSE
    return made


def test_tools(tmp_path):
    """What a tool answers is not trained on, and counts in no denominator."""
    calls = []

    def look() -> str:
        """Look."""
        calls.append(1)
        return "w30 w31 w32"

    model = tiny.make("phi-bias")
    with torch.no_grad():
        model.lm_head.bias[[1, 3]] += 2  # responses end, and tools are called
    made = trainer(
        tmp_path,
        model,
        algorithm="dapo",
        dynamic=False,
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{i}"}] for i in range(4, 12)]}),
        tokenizer=calling_tokenizer(),
        max_completion_length=40,
        max_tool_calling_iterations=2,
        max_steps=1,
        more={"tools": [look]},
    )
    made.train()
    assert calls
    batch = made._buffered_inputs[0]
    answer_BT = ~batch["tool_mask"].bool() & batch["completion_mask"].bool()
    assert {30, 31, 32} <= set(batch["completion_ids"][answer_BT].tolist())
    tokens = int((batch["completion_mask"] * batch["tool_mask"]).sum())
    assert int(answer_BT.sum()) > 0
    assert made._window.denominator == tokens
