"""RPGTrainer with a real vLLM in the same process (TRL's colocate mode) on a CPU, in vLLM's environment.

Two things of TRL's cannot be had on a CPU, and are replaced. Its engine compiles, which takes minutes, and TRL has no
setting against it. And it hands new weights to the model's load_weights, which fails there ('Parameter' object has no
attribute 'weight_loader'), as vLLM's layers hold packed copies: the same weights go through vLLM's own reload instead.
Generation, its log-probabilities and what follows are TRL's.
"""

import functools
import os

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from rpg.integrations.trl import RPGConfig, RPGTrainer
from rpg.rollout.vllm import _load

VOCABULARY = 80


def save_model(folder):
    """Heads as wide as vLLM wants them on a CPU."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", model_max_length=64
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2)
    model.save_pretrained(folder)
    return tokenizer


def low_words(completion_ids, **_):
    return [sum(1 < i < 40 for i in ids) / len(ids) for ids in completion_ids]


def sync_weights(self):
    """TRL's names and weights, one after the other, loaded by vLLM's worker."""
    with torch.no_grad():
        self.llm.collective_rpc(_load, args=(self._iter_named_params(),))
    assert self.llm.reset_prefix_cache()


def test_training_with_vllm(tmp_path, monkeypatch):
    from trl.generation import vllm_generation

    engine = functools.partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    monkeypatch.setattr(vllm_generation, "LLM", engine)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", sync_weights)
    tokenizer = save_model(tmp_path / "model")
    args = RPGConfig(
        str(tmp_path / "out"),
        loss={"mismatch": "tis"},
        use_vllm=True,
        vllm_max_model_length=64,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=10,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=12,
        overlong=False,
        learning_rate=2e-2,
    )
    prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(2, 34)]})
    trainer = RPGTrainer(str(tmp_path / "model"), low_words, args, prompts, processing_class=tokenizer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    # the weights reach vLLM: what it says of its own tokens stays near what the trainer says, while the policy moves
    for row in rows:
        assert 0 < row["mismatch/max_log_ratio"] < 1e-3
        assert row["mismatch/kl"] < 1e-6
        assert row["kl/old"] == pytest.approx(0, abs=1e-5)
