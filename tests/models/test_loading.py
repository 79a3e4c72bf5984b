"""Models by name: what is found, and what is said of what is not. The hub is a small server of our own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from models.gguf_files import made, write
from rpg.models import adapters, loading
from rpg.models.loading import load
from rpg.models.meta import config_of, shell
from rpg.models.policy import Policy
from rpg.run.config import PeftConfig

ONE_LINE = r"^[^\n]*{}[^\n]*$".format
WAITED = 15.0  # seconds; whoever asks a hub that does not answer again and again takes longer
ASK = """
import json, sys, time
import torch, rpg.models.loading as loading
loading.load("builtin")  # the imports, which take longer the busier the machine is
out = []
for name in json.loads(sys.argv[1]):
    name, _, revision = name.partition("@")
    options = {"revision": revision} if revision else {}
    begin = time.perf_counter()
    try:
        model, tokenizer = loading.load(name, options=options)
        said = type(model).__name__ + " " + str(sum(p.double().sum().item() for p in model.parameters()))
    except ValueError as error:
        said = str(error)
    out.append([said, time.perf_counter() - begin])
print(json.dumps(out))
"""


def folder(path, model="llama"):
    Policy(tiny.make(model), tiny.tokenizer()).save(path)
    return path


def total(model):
    return sum(p.double().sum().item() for p in model.parameters())


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(tmp_path):
    model, tokenizer = load(str(folder(tmp_path / "m")), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, tiny.make(dtype=torch.bfloat16).lm_head.weight)
    assert tokenizer.eos_token_id == 1
    assert type(load("builtin")[0]).__name__ == "LlamaForCausalLM"


def without_tokenizer(path):
    for file in path.glob("tokenizer*"):
        file.unlink()


def of_kind(kind, **more):
    def change(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"architectures": [kind], **more}))

    return change


def cut(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def without_a_weight(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


MISTAKES = {
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json in it; give a folder"),
    "no tokenizer": (without_tokenizer, "no tokenizer files: copy"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "cannot load the model"),
    "damaged": (cut, "damaged .*fetch it again"),
    "not JSON": (lambda path: (path / "config.json").write_text("{"), "cannot load the model"),
    "damaged tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), "cannot load the model"),
    "encoder": (of_kind("BertForMaskedLM"), "is a BertForMaskedLM, no causal language model"),
    "classifier": (of_kind("LlamaForSequenceClassification"), "no causal language model"),
    "vision": (of_kind("CLIPModel2", model_type="clip"), "no causal language model"),
    "quantised": (
        of_kind("LlamaForCausalLM", quantization_config={"quant_method": "awq", "bits": 4}),
        r"quantised weights \(awq\)",
    ),
    "own code": (
        of_kind(
            "MineForCausalLM", model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.M"}
        ),
        "--model_options.trust_remote_code true",
    ),
    "incomplete": (without_a_weight, "lacks 1 of the model's weights, lm_head.weight"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_folder_that_is_not_whole_is_one_line(name, tmp_path):
    change, text = MISTAKES[name]
    change(folder(tmp_path / "m"))
    with pytest.raises(ValueError, match=ONE_LINE(text)) as found:
        load(str(tmp_path / "m"))
    assert str(tmp_path / "m") in str(found.value)


def test_names_that_mean_nothing():
    for name, text in {
        "./nowhere": "no such folder",
        "a b": "neither a folder nor a hub id",
        "./x.gguf": "no file ./x.gguf",
        "bultin": "did you mean builtin[?]",
        "x.gguf": "on the hub it is org/name/file.gguf",
    }.items():
        with pytest.raises(ValueError, match=ONE_LINE(text)):
            load(name)
    with pytest.raises(ValueError, match=ONE_LINE("model_options.torch_dtype: give --dtype")):
        load("builtin", options={"torch_dtype": "float16"})


def test_a_full_disk_is_named(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ValueError, match=ONE_LINE("the disk is full while loading builtin: .*HF_HOME")):
        load("builtin")


def test_padding_where_there_is_none():
    model = tiny.make()
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    loading.complete(tokenizer, model)
    assert tokenizer.pad_token == "<eos>"
    tokenizer.pad_token = tokenizer.eos_token = None
    loading.complete(tokenizer, model)  # the config's end token
    assert tokenizer.pad_token == "<eos>"
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.pad_token, tokenizer.unk_token = None, "w5"
    loading.complete(tokenizer, model)
    assert tokenizer.pad_token == "w5"
    tokenizer.pad_token = tokenizer.unk_token = None
    with pytest.raises(ValueError, match=ONE_LINE("neither a padding nor an end token")):
        loading.complete(tokenizer, model)


def test_a_subfolder_is_of_the_first_model(tmp_path):
    """A checkpoint of a run whose model lay in a subfolder does not have one."""
    folder(tmp_path / "m" / "inner")
    assert total(load(str(tmp_path / "m"), options={"subfolder": "inner"})[0]) == total(tiny.make())
    assert total(load(str(tmp_path / "m" / "inner"), options={"subfolder": "inner"})[0]) == total(tiny.make())


def nested(path):
    """A model, and another one in its subfolder: (folder, how the inner one is loaded)."""
    folder(path)
    Policy(tiny.make(spread=0.5), tiny.tokenizer()).save(path / "inner")
    return path, {"subfolder": "inner"}


def test_an_adapter_goes_on_the_model_in_the_subfolder(tmp_path):
    path, options = nested(tmp_path / "m")
    policy = Policy.load(str(path), options=options, peft=PeftConfig("lora", {"r": 2, "init_lora_weights": False}))
    policy.save(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    for named in (path / "inner", path):  # as it is written now; as a base of that name is meant
        (tmp_path / "saved" / "adapter_config.json").write_text(
            json.dumps(about | {"base_model_name_or_path": str(named)})
        )
        again = Policy.load(str(tmp_path / "saved"), options=options)
        assert total(again.model) == total(policy.model)
    assert about["base_model_name_or_path"] == str(path / "inner")
    (tmp_path / "saved").rename(path / "adapters")
    (path / "adapters" / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(path)}))
    assert total(load(str(path), options={"subfolder": "adapters"})[0]) == pytest.approx(
        total(policy.model) - total(tiny.make(spread=0.5)) + total(tiny.make())
    )


def test_the_shape_is_that_of_the_subfolder(tmp_path):
    folder(tmp_path / "m", "qwen3")
    folder(tmp_path / "m" / "inner", "llama")
    (tmp_path / "n").mkdir()
    (tmp_path / "m" / "inner").rename(tmp_path / "n" / "inner")
    folder(tmp_path / "m" / "inner", "llama")
    for place in ("m", "n"):
        assert config_of(str(tmp_path / place), {"subfolder": "inner"})[0].model_type == "llama"
    assert config_of(str(tmp_path / "m"), {"subfolder": "nonesuch"})[0].model_type == "qwen3"
    assert type(shell(str(tmp_path / "n"), torch.float32, {"subfolder": "inner"}).model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20}, {"do_sample": True, "top_k": 20}),
        ({"early_stopping": True, "pad_token_id": -1}, {"early_stopping": None, "pad_token_id": None}),
        ({"do_sample": True, "top_k": 20, "pad_token_id": 0}, {"do_sample": True, "top_k": 20, "pad_token_id": 0}),
    ],
)
def test_generation_settings_that_contradict_each_other_can_be_saved(settings, kept, tmp_path):
    path = folder(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "bos_token_id": 2, **settings}))
    policy = Policy.load(str(path))
    policy.save(tmp_path / "saved")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (found.eos_token_id, found.bos_token_id) == ([1, 5], 2)
    assert {key: getattr(found, key) for key in kept} == kept
    assert Policy.load(str(tmp_path / "saved")).end_ids() == policy.end_ids() == [1, 5]


# ---- the hub ---------------------------------------------------------------------------------------------------------


def adapted():
    return adapters.attach(tiny.make(), "lora", {"r": 2, "init_lora_weights": False}, "org/tiny")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    folder(root / "org" / "tiny")
    (root / "org" / "tiny" / "quants").mkdir()
    write(root / "org" / "tiny" / "quants" / "m.gguf", made("qwen2"))
    Policy(adapted(), tiny.tokenizer()).save(root / "org" / "adapter")
    (root / "org" / "empty").mkdir()
    (root / "org" / "empty" / "README.md").write_text("nothing")
    process = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "hub.py", root], stdout=subprocess.PIPE, text=True
    )
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()


def ask(endpoint, cache, names, **env):
    """What is said of these names ("NAME@REVISION", too), in a process with this hub and this cache, and the seconds
    it took."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), **env}
    line = [sys.executable, "-c", ASK, json.dumps(names)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_from_the_hub_then_from_the_cache(hub, tmp_path):
    names = ["org/tiny@v9", "org/tiny", "org/empty", "org/nothing"]
    names += [
        "org/adapter",
        "org/tiny/quants/m.gguf",
        "missing/m",
        "gated/m",
        "unknown/m",
        "badtoken/m",
        "down/m",
        "org/tiny/x.gguf",
    ]
    said = dict(zip(names, ask(hub, tmp_path, names), strict=True))
    assert said["org/tiny"][0] == f"LlamaForCausalLM {total(tiny.make())}"
    assert said["org/tiny/quants/m.gguf"][0] == f"Qwen2ForCausalLM {total(made('qwen2'))}"
    assert said["org/adapter"][0] == f"LlamaForCausalLM {total(adapted())}" != said["org/tiny"][0]
    for name, text in {
        "org/empty": "org/empty has no config.json: see https://huggingface.co/org/empty/tree/main",
        "org/nothing": "org/nothing: no such model on the hub (and no such folder): check the name",
        "missing/m": "missing/m: no such model on the hub (and no such folder): check the name",
        "gated/m": "gated/m is gated: accept its terms at https://huggingface.co/gated/m and run `hf auth login`",
        "unknown/m": "unknown/m: no such model on the hub",
        "badtoken/m": "the hub does not know your token: run `hf auth login`, or unset HF_TOKEN (for badtoken/m)",
        "down/m": "the hub answers 503 for down/m, and it is not in the cache",
        "org/tiny/x.gguf": "org/tiny has no x.gguf: see",
    }.items():
        assert said[name][0].startswith(text)
        assert "\n" not in said[name][0]
        assert said[name][1] < WAITED, name
    assert said["org/tiny@v9"][0] == "org/tiny has no revision 'v9': check model_options.revision"
    for endpoint, env in (("http://127.0.0.1:9", {}), (hub, {"HF_HUB_OFFLINE": "1"})):
        names = ["org/tiny", "org/other", "org/tiny/quants/m.gguf", "org/adapter"]
        cached, gone, *others = ask(endpoint, tmp_path, names, **env)
        assert [other[0] for other in others] == [said[name][0] for name in names[2:]]
        assert cached[0] == said["org/tiny"][0]
        reason = "the hub is not asked (HF_HUB_OFFLINE)" if env else "no network"
        assert reason in gone[0]
        assert "not in the cache" in gone[0]
        assert gone[0].endswith("give a local folder")
        assert gone[1] < WAITED
        assert cached[1] < WAITED
