"""A model's card: what the hub reads of it, what it says, and what it must not say."""

import shlex
from dataclasses import replace

import huggingface_hub
import pytest

import rpg
import tiny
from rpg import cli, secrets
from rpg.api import configure
from rpg.models import BUILTIN
from rpg.models.policy import Policy
from rpg.publish.card import Base, base_of, is_ours, public, run_card, train_command
from rpg.run.auto import settled
from rpg.run.config import Config, PeftConfig
from rpg.run.settings import flat, given
from rpg.training.setup import algorithm_of

SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"
QWEN = Base("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", {"license": "apache-2.0"})
QUICK = {"rollout.dynamic": False, "log.tensorboard": False, "log.view": "none", "log.report": False}
EVALS = [
    {"step": step, "mean": mean, "sets": {"gsm8k": {"mean": mean, "low": mean - 0.04, "high": mean + 0.05}}}
    for step, mean in ((0, 0.31), (40, 0.47))
]
DATA = {"": [7473, "hash"], "gsm8k": [1319, "hash"]}


def card(config, base=QWEN, evals=EVALS, adapter=None):
    config = settled(config)
    return run_card(config, algorithm_of(config), base, DATA, 40, 1_234_567, evals, adapter)


def test_the_hub_reads_it():
    """Through the hub's own classes, which refuse what is no metadata."""
    config = configure(settings={"model": QWEN.id, "task.name": "gsm8k", "eval.k": 8, "algorithm": "grpo"})
    read = huggingface_hub.ModelCard(card(config))
    data = read.data
    assert (data.license, data.base_model, data.base_model_relation) == ("apache-2.0", QWEN.id, "finetune")
    assert (data.library_name, data.pipeline_tag, data.datasets) == (
        "transformers",
        "text-generation",
        ["openai/gsm8k"],
    )
    (result,) = data.eval_results
    assert (result.dataset_type, result.dataset_name, result.metric_name) == ("openai/gsm8k", "gsm8k", "mean@8")
    assert result.metric_value == 0.47
    assert result.metric_args == {"low": 0.47 - 0.04, "high": 0.47 + 0.05, "problems": 128}
    for text in (
        "| gsm8k | 128 | 31.0% [27.0%, 36.0%] | **47.0% [43.0%, 52.0%]** |",
        "after 40 steps of `grpo` on gsm8k (1.23 M sampled tokens)",
        "[arXiv 2402.03300](https://arxiv.org/abs/2402.03300)",
        "7,473 problems",
        "rpg eval path/to/this/folder --task gsm8k --k 8 --problems 128",
        'AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")',
        "apache-2.0, as [Qwen/Qwen2.5-0.5B-Instruct]",
    ):
        assert text in read.content, text
    adapter = huggingface_hub.ModelCard(card(replace(config, peft=PeftConfig("lora")), adapter="lora")).data
    assert (adapter.library_name, adapter.base_model_relation) == ("peft", "adapter")
    assert "lora" in adapter.tags


def test_its_command_makes_the_same_run():
    config = settled(
        configure(
            settings={
                "algorithm": "dr-grpo",
                "loss": {"beta": 1e-3, "constant": "longest"},
                "model": "org/name",
                "task.name": "0.7*gsm8k + 0.3*math",
                "task.rewards": {"correct": 1, "my_reward.py:score": 0.5},
                "task.template": 'Solve it.\n{prompt}\nEnd with /done, it\'s "over"',
                "task.chat_options": {"enable_thinking": False, "note": "yes", "more": {"a": [1, 2]}},
                "optim.betas": (0.9, 0.99),
                "optim.recompute": True,
                "rollout.dynamic": False,
                "peft": {"method": "lora", "options": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
            }
        )
    )
    args = cli.build_parser().parse_args(shlex.split(train_command(config).replace("\\\n", ""))[1:])
    assert flat(configure(flags=given(args, Config))) == flat(config)


def test_nothing_of_this_machine_and_no_secret(monkeypatch, tmp_path):
    monkeypatch.setattr(secrets, "_known", set())
    config = configure(
        settings={
            "model": str(tmp_path / "models" / "mine"),
            "model_options": {"token": SECRET, "cache_dir": str(tmp_path / "cache")},
            "output": str(tmp_path / "run"),
            "task.name": f"{tmp_path}/data/sums.jsonl",
            "task.test": f"~/held/one.jsonl,{tmp_path}/two.jsonl",
            "task.rewards": {f"{tmp_path}/reward.py:score": 1.0},
            "task.template": f"@{tmp_path}/template.txt",
            "reference.model": f"../{tmp_path.name}/teacher",
            "algorithm": "distill",
        }
    )
    evals = [{"step": 0, "mean": 0.5, "sets": {f"{tmp_path}/two": {"mean": 0.5, "low": 0.4, "high": 0.6}}}]
    text = card(config, base_of(config.model, config.model_options), evals)
    assert str(tmp_path) not in text
    assert tmp_path.name not in text
    assert SECRET not in text
    assert "~" not in text
    for name in ("sums.jsonl", "one.jsonl,two.jsonl", "reward.py:score", "@template.txt", "--reference.model teacher"):
        assert name in text, name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/b/c.jsonl", "c.jsonl"),
        ("0.7*/a/b.jsonl + 0.3*./c/d.jsonl", "0.7*b.jsonl + 0.3*d.jsonl"),
        ("org/name@sub#train", "org/name@sub#train"),
        ("gym:leg_counting", "gym:leg_counting"),
        ("/a/model/", "model/"),
    ],
)
def test_folders_go_names_stay(text, shown):
    assert public(text) == shown


def front(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{text}\n---\n# theirs\n")
    return folder


def test_what_is_known_of_the_base(tmp_path):
    cache = tmp_path / "cache" / "models--org--name"
    front(cache / "snapshots" / ("0" * 40), "license: other\nlicense_name: llama\nlicense_link: https://x.y/z")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    here = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True}
    licensed = {"license": "other", "license_name": "llama", "license_link": "https://x.y/z"}
    assert base_of("org/name", here) == Base("org/name", "org/name", licensed)
    assert base_of("org/name/model.gguf", here) == Base("org/name", "org/name", licensed)
    assert base_of("org/other", here) == Base("org/other", "org/other", {})
    local = front(tmp_path / "mine", "license: mit\nbase_model: org/name")
    assert base_of(str(local), {}) == Base("mine", "org/name", {"license": "mit"})
    assert base_of(str(front(tmp_path / "odd", "license: [1, {")), {}) == Base("odd")
    for name in ("builtin", str(BUILTIN)):
        assert base_of(name, {}) == Base("the model that comes with rpg", None, {"license": "mit"})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{local}"}}')
    assert base_of(str(adapter), {}) == base_of(str(local), {})
    # a run that is resumed asks nobody: its own last card says it
    (tmp_path / "card.md").write_text(card(Config(model="org/other"), Base("org/other", "org/other", licensed)))
    assert base_of("org/other", here, tmp_path / "card.md") == Base("org/other", "org/other", licensed)


def test_the_card_of_a_base_is_not_ours(tmp_path, capsys):
    """A run and a merge write their own in its place; so does an adapter's, where PEFT has written one."""
    base = front(tmp_path / "base", "license: apache-2.0\nbase_model: org/base")
    Policy(tiny.make(vocab_size=260, max_position_embeddings=2048), tiny.tokenizer()).save(base)
    tiny.with_bytes(base)
    assert not is_ours(base)
    small = {
        "rollout.prompts": 2,
        "rollout.samples": 2,
        "eval.problems": 4,
        "eval.k": 1,
        "rollout.max_new_tokens": 20,
        **QUICK,
    }
    rpg.train(output=tmp_path / "run", model=str(base), **small, **{"peft.method": "lora", "steps": 1})
    assert cli.main(["merge", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0
    trained = max((tmp_path / "run" / "checkpoints").iterdir()) / "model"
    for folder, library in ((trained, "peft"), (tmp_path / "merged", "transformers")):
        assert is_ours(folder)
        text = (folder / "README.md").read_text()
        data = huggingface_hub.ModelCard(text).data
        assert (data.license, data.base_model, data.library_name) == ("apache-2.0", "org/base", library)
        assert "theirs" not in text
        assert str(tmp_path) not in text
    assert "1 merged" in text
    again = rpg.merge([base], tmp_path / "copied", init=str(base))
    assert again.norms == [0.0]
    assert "theirs" not in (tmp_path / "copied" / "README.md").read_text()
