"""Text in, text out: prompts, templates, end tokens, and a policy saved and loaded."""

import shutil

import huggingface_hub
import pytest
import torch

import tiny
from rpg.models import BUILTIN
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine

CHAT = "{% for m in messages %}w9 {{ m['content'] }} w10{% endfor %}{% if add_generation_prompt %} w11{% endif %}"


def test_prompts_with_and_without_a_chat_template():
    plain, chat = Policy(tiny.make(), tiny.tokenizer()), Policy(tiny.make(), tiny.tokenizer(CHAT))
    assert plain.encode("w5 w6") == [5, 6] == chat.encode("w5 w6", chat=False)
    assert chat.encode("w5 w6") == [9, 5, 6, 10, 11] == chat.encode("w5 w6", chat=True)
    with pytest.raises(ValueError, match=r"^[^\n]*chat template[^\n]*$"):
        plain.encode("w5", chat=True)


SYSTEM = (
    "{{ bos_token }} {% for m in messages %}{% if m['role'] == 'system' and m['content'] == 'w8' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ 'w7' if m['role'] == 'system' else 'w9' }} {{ m['content'] }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}w12{% else %}w11{% endif %}"
)


def test_system_prompt_and_options_go_to_the_template():
    tokenizer = tiny.tokenizer(SYSTEM)
    tokenizer.bos_token = "w2"
    chat = Policy(tiny.make(), tokenizer)
    assert chat.encode("w5") == [2, 9, 5, 11]  # the template's first token, once
    assert chat.encode("w5", system="w6") == [2, 7, 6, 9, 5, 11]
    assert chat.encode("w5", system="", options={"enable_thinking": False}) == [2, 9, 5, 12]
    with pytest.raises(ValueError, match=r"^[^\n]*System role not supported; leave task.system empty$"):
        chat.encode("w5", system="w8")
    for plain, how in ((Policy(tiny.make(), tiny.tokenizer()), {}), (chat, {"chat": False})):
        with pytest.raises(ValueError, match=r"^a system prompt needs the model's chat template[^\n]*$"):
            plain.encode("w5", system="w6", **how)
    broken = Policy(tiny.make(), tiny.tokenizer("{{ messages[0]['content'] + 1 }}"))
    with pytest.raises(ValueError, match=r"^the model's chat template fails: [^\n]*; give --task.chat false[^\n]*$"):
        broken.encode("w5")
    unclosed = Policy(tiny.make(), tiny.tokenizer("{% for m in messages %}"))
    with pytest.raises(ValueError, match=r"^the model's chat template fails: [^\n]*$"):
        unclosed.encode("w5")


def test_a_system_prompt_that_the_template_drops_is_refused():
    deaf = Policy(tiny.make(), tiny.tokenizer("{{ messages[-1]['content'] }} w11"))
    assert deaf.encode("w5") == [5, 11]
    with pytest.raises(ValueError, match=r"^the model's chat template ignores the system prompt: [^\n]*$"):
        deaf.encode("w5", system="w6")
    usual = "{{ messages[0]['content'] if messages[1] is defined else 'w6' }} {{ messages[-1]['content'] }}"
    chosen = Policy(tiny.make(), tiny.tokenizer(usual))
    assert chosen.encode("w5", system="w6") == chosen.encode("w5") == [6, 5]  # as what it says by itself


@pytest.mark.parametrize("name", ["tokenize", "return_tensors", "add_generation_prompt", "truncation", "return_dict"])
def test_what_is_no_option_of_the_template_is_refused(name):
    chat = Policy(tiny.make(), tiny.tokenizer(CHAT))
    with pytest.raises(
        ValueError, match=rf"^task.chat_options.{name} is no option of the chat template: leave it out$"
    ):
        chat.encode("w5", options={"enable_thinking": False, name: False})


def test_an_empty_template_is_none():
    empty = Policy(tiny.make(), tiny.tokenizer(""))
    assert empty.tokenizer.chat_template == ""
    assert empty.encode("w5") == [5]
    with pytest.raises(ValueError, match="has no chat template"):
        empty.encode("w5", chat=True)


def test_a_prompt_does_not_end_in_an_end_token():
    from tokenizers import processors

    tokenizer = tiny.tokenizer()
    single = processors.TemplateProcessing(single="w2 $A <eos> w7", special_tokens=[("w2", 2), ("<eos>", 1), ("w7", 7)])
    tokenizer.backend_tokenizer.post_processor = single
    chosen = Policy(tiny.make(), tokenizer)
    chosen.model.generation_config.eos_token_id = [1, 7]
    assert tokenizer("w5")["input_ids"] == [2, 5, 1, 7]
    assert chosen.encode("w5") == [2, 5]
    assert chosen.encode("") == [2]


def test_a_first_token_is_written_once():
    """By the template where there is one, else by the tokenizer."""
    from tokenizers import processors

    tokenizer = tiny.tokenizer(SYSTEM)
    tokenizer.bos_token = "w2"
    single = processors.TemplateProcessing(single="w2 $A", special_tokens=[("w2", 2)])
    tokenizer.backend_tokenizer.post_processor = single
    chosen = Policy(tiny.make(), tokenizer)
    assert chosen.encode("w5", chat=False) == [2, 5]
    assert chosen.encode("w5") == [2, 9, 5, 11]


def test_decoding_leaves_out_end_and_padding_only():
    assert Policy(tiny.make(), tiny.tokenizer()).decode([5, 6, 1, 0, 0]) == "w5 w6"
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = "w2"
    tokenizer.add_special_tokens({"additional_special_tokens": ["w30", "w31"]})  # <think>, </think>
    model = tiny.make()
    model.generation_config.eos_token_id = [1, 33]
    chosen = Policy(model, tokenizer)
    assert tokenizer.decode([30, 5], skip_special_tokens=True) == "w5"
    assert chosen.decode([2, 30, 5, 31, 6, 33]) == "w30 w5 w31 w6"
    assert chosen.end_ids("w20") == [1, 20, 33]
    assert chosen.decode([5, 20, 1]) == "w5 w20"  # an end that was asked for is part of the text


def test_end_tokens_are_the_tokenizers_the_models_and_those_asked_for():
    model = tiny.make()
    chosen = Policy(model, tiny.tokenizer())
    assert chosen.end_ids() == [1]
    model.generation_config.eos_token_id = [4, 3]
    model.config.eos_token_id = 7
    assert chosen.end_ids() == [1, 3, 4, 7]
    assert chosen.end_ids("w9  w8") == [1, 3, 4, 7, 8, 9]
    for text in ("nonsense", "w9 w5w6"):
        with pytest.raises(ValueError, match=r"^rollout.end_tokens: '[^\n]*' is not one token of this model$"):
            chosen.end_ids(text)
    run = NativeEngine(model, chosen.tokenizer, end_ids=chosen.end_ids("w9"))
    assert run.end_ids == [1, 3, 4, 7, 9]
    chosen.tokenizer.eos_token = None
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match=r"^the model has no end token: name one with --rollout.end_tokens$"):
        chosen.end_ids()
    assert chosen.end_ids("w9") == [9]


def test_white_space_names_no_end_token():
    assert Policy(tiny.make(), tiny.tokenizer()).end_ids("") == [1]
    for text in (" ", "\n\n"):
        with pytest.raises(ValueError, match=r"^rollout.end_tokens: white space cannot be named[^\n]*$"):
            Policy(tiny.make(), tiny.tokenizer()).end_ids(text)


def without_ends():
    tokenizer, model = tiny.tokenizer(CHAT), tiny.make()
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model, tokenizer


def test_a_model_without_an_end_token_of_its_own():
    chosen = Policy(*without_ends())
    assert chosen.end_ids("w9") == [9]
    assert chosen.decode([5, 6, 9, 0]) == "w5 w6 w9"


def test_an_end_token_that_pads_is_not_unknown():
    model, tokenizer = without_ends()
    tokenizer.pad_token, model.generation_config.eos_token_id = None, [10, 1]
    chosen = Policy(model, tokenizer)
    assert tokenizer.pad_token_id == 10  # which CHAT writes after every message
    assert chosen.unknown_ids == set()
    model, tokenizer = without_ends()
    tokenizer.pad_token, tokenizer.bos_token = None, "w9"
    assert Policy(model, tokenizer).unknown_ids == set()
    assert tokenizer.pad_token_id == 9
    tokenizer.unk_token, tokenizer.pad_token = "w3", "w4"
    assert Policy(model, tokenizer).unknown_ids == {3, 4}


def test_a_tokenizer_without_padding_pads_with_its_end_token():
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    Policy(tiny.make(), tokenizer)
    assert tokenizer.pad_token_id == 1


# ---- files -----------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same_policy(tmp_path):
    chosen = Policy(tiny.make("llama-tied"), tiny.tokenizer(CHAT), 0.8)
    chosen.save(tmp_path / "model")
    again = Policy.load(str(tmp_path / "model"), temperature=0.8)
    rows = torch.tensor([[5, 6, 7, 10, 11], [3, 9, 8, 14, 1]]), torch.tensor([3, 3]), torch.ones(2, 2, dtype=torch.bool)
    assert torch.equal(chosen.score(*rows).logp_BT, again.score(*rows).logp_BT)
    assert again.encode("w5 w6") == [9, 5, 6, 10, 11]
    assert again.temperature == 0.8
    assert again.context == 64
    half = Policy.load(str(tmp_path / "model"), dtype=torch.bfloat16)
    assert {p.dtype for _, p in half.parameters()} == {torch.bfloat16}


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Policy(tiny.make(), tiny.tokenizer()).save(tmp_path / "model")
    assert Policy.load("~/model").context == 64


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # or the hub is asked again and again
    one_line = r"^[^\n]*{}[^\n]*$".format
    with pytest.raises(ValueError, match=one_line("no config.json")):
        Policy.load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=one_line("no config.json")):
        Policy.load("./nowhere")
    with pytest.raises(ValueError, match=one_line("not in the cache")):
        Policy.load("no-such-model-anywhere")
    for name, content in {
        "config.json": "{",
        "tokenizer.json": "{",
        "model.safetensors": "nonsense",
    }.items():
        folder = tmp_path / name
        shutil.copytree(BUILTIN, folder)
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=one_line(f"cannot load the model '{folder}'")):
            Policy.load(str(folder))
    folder = tmp_path / "without"
    shutil.copytree(BUILTIN, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=one_line("cannot load the model")):
        Policy.load(str(folder))
