"""A policy's scores against the naive computation from the model's own logits."""

import pytest
import torch
import transformers

import tiny
from rpg.kernels import custom_attention
from rpg.kernels.kept import Kept
from rpg.models import architecture
from rpg.models import policy as policy_module
from rpg.models.policy import Policy

NOT_LINEAR = {"phi-bias", "granite-scale", "cohere-scale", "gemma2-final-cap"}
PROMPTS = [[5, 6, 7], [3], [4, 4, 9, 2, 8], [7, 8, 12, 13]]
RESPONSES = [[10, 11, 12, 13, 1], [14, 15], [16], [17, 18, 19, 20, 21, 22]]


def policy(name="llama", temperature=1.0, **how):
    return Policy(tiny.make(name, **how), tiny.tokenizer(), temperature)


def padded(prompts=PROMPTS, responses=RESPONSES, extra=2):
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)) + extra, dtype=torch.long)
    mask = torch.zeros(len(rows), max(map(len, responses)) + extra, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(responses[i])] = True
    return ids, torch.tensor([len(p) for p in prompts]), mask


def naive(model, prompt, response, temperature):
    """Alone, unpadded, from the logits that the model gives."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    logp = logits.log_softmax(-1)
    return logp[torch.arange(len(response)), response], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_scores_are_those_of_each_response_alone(name, temperature):
    chosen = policy(name, temperature)
    assert chosen.linear == (name not in NOT_LINEAR)
    ids, start, mask = padded()
    scored = chosen.score(ids, start, mask)
    assert scored.logp_BT.shape == scored.entropy_BT.shape == mask.shape
    assert not scored.logp_BT[~mask].any()
    assert not scored.entropy_BT[~mask].any()
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logp, entropy = naive(chosen.model, prompt, response, temperature)
        assert torch.allclose(scored.logp_BT[i, : len(response)], logp, atol=1e-4)
        assert torch.allclose(scored.entropy_BT[i, : len(response)], entropy, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2-final-cap", "phi-bias"])
def test_gradients_are_those_of_the_naive_computation(name):
    chosen = policy(name, temperature=0.7, dtype=torch.float64)
    chosen.score(*padded()).logp_BT.sum().backward()
    found = {key: p.grad.clone() for key, p in chosen.model.named_parameters()}
    chosen.model.zero_grad()
    sum(naive(chosen.model, *pair, 0.7)[0].sum() for pair in zip(PROMPTS, RESPONSES, strict=True)).backward()
    for key, p in chosen.model.named_parameters():
        assert torch.allclose(found[key], p.grad, rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("chunk", [2**25, 1], ids=["at once", "a state at a time"])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2-final-cap", "phi-bias", "granite-scale"])
def test_over_kept_sets_it_is_the_softmax_of_their_logits(name, chunk, monkeypatch):
    """Values and gradients, of heads that are linear and of those that are not."""
    monkeypatch.setattr(policy_module, "CHUNK_ELEMENTS", chunk)
    chosen = policy(name, temperature=0.7, dtype=torch.float64)
    ids, start, mask = padded()
    targets = torch.tensor([token for response in RESPONSES for token in response])
    kept_NV = torch.rand(len(targets), tiny.VOCABULARY, generator=torch.Generator().manual_seed(2)) < 0.2
    kept_NV[torch.arange(len(targets)), targets] = True
    sets = Kept(kept_NV.nonzero()[:, 1].int(), kept_NV.sum(-1))
    scored = chosen.score(ids, start, mask, kept=sets)
    scored.logp_BT.sum().backward()
    found = {key: p.grad.clone() for key, p in chosen.model.named_parameters()}
    chosen.model.zero_grad()
    logits = [
        chosen.model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1] for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    total = 0.0
    for n, logits_V in enumerate(torch.cat(logits)):
        over = torch.distributions.Categorical(logits=logits_V[kept_NV[n]] / 0.7)
        logp = over.log_prob(kept_NV[n, : targets[n]].sum())
        assert float(scored.logp_BT[mask][n].detach()) == pytest.approx(float(logp.detach()), abs=1e-5)
        assert float(scored.entropy_BT[mask][n]) == pytest.approx(float(over.entropy().detach()), abs=1e-5)
        total = total + logp
    total.backward()
    for key, p in chosen.model.named_parameters():
        assert torch.allclose(found[key], p.grad, rtol=1e-3, atol=1e-4), key


def test_hidden_states_are_those_before_the_head():
    chosen = policy("llama")
    ids, start, mask = padded()
    scored = chosen.score(ids, start, mask)
    row, t = mask.nonzero(as_tuple=True)
    logp = (scored.hidden_NH @ chosen.head().T).log_softmax(-1)[torch.arange(len(row)), ids[row, start[row] + t]]
    assert torch.allclose(logp, scored.logp_BT[mask], atol=1e-5)
    assert policy("phi-bias").score(ids, start, mask).hidden_NH is None


def test_a_bias_and_a_cap_that_do_nothing_yet_are_not_overlooked():
    """A new bias is zero, and a cap does nothing to small logits: until they have been trained."""
    model = tiny.make("phi-bias")
    with torch.no_grad():
        model.lm_head.bias.zero_()
    assert not Policy(model, tiny.tokenizer()).linear
    assert not policy("gemma2-final-cap", spread=1e-4).linear
    assert not policy("granite-scale", spread=1e-4).linear
    assert policy("llama", spread=1e-4).linear


def test_half_precision_head_is_recognised():
    assert policy("llama", dtype=torch.bfloat16).linear
    assert not policy("granite-scale", dtype=torch.bfloat16).linear


def test_the_policy_is_deterministic_whatever_the_dropout():
    model = tiny.make("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    chosen = Policy(model, tiny.tokenizer())
    assert torch.equal(chosen.score(*padded()).logp_BT, chosen.score(*padded()).logp_BT)


def test_parameters_are_those_that_are_trained():
    chosen = policy("llama-tied")
    names = [name for name, _ in chosen.parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied: once
    chosen.model.model.norm.weight.requires_grad_(False)
    assert [name for name, _ in chosen.parameters()] == [name for name in names if name != "model.norm.weight"]


# ---- sequences end to end --------------------------------------------------------------------------------------------

TOGETHER = [([5, 6, 7, 3, 9], [10, 11, 12, 13, 14, 1]), ([7, 3, 3, 2, 8], [4, 5, 6]), ([5, 6, 7, 3, 9], [30, 31])]
TOGETHER += [([8], [9, 9]), ([5, 6, 7, 3, 9], [17]), ([7, 3, 3, 2, 8], [5, 5, 5, 5]), ([5, 6, 7, 3, 9], [10, 20, 1])]
NUMBERS = torch.tensor([4, 2, 4, 9, 4, 2, 4])  # 4 and 2 are of the same length
MORE = {
    "phi3-window": ("Phi3Config", {"sliding_window": 3}),
    "gemma3-middle": ("Gemma3TextConfig", {**tiny.GEMMA3, "sliding_window": 7}),
}
UNFIT = {
    "capped": ("Gemma2Config", {"head_dim": 8}, "softcap"),
    "states": ("MambaConfig", {}, "0 of its 2 layers"),
    "mixed": ("JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, "1 of its 2 layers"),
    "biased": ("BloomConfig", {}, "0 of its 2 layers"),
}


def built(name):
    kind, own = MORE[name] if name in MORE else UNFIT[name][:2] if name in UNFIT else (None, {})
    made = tiny.make(config=kind, **own) if kind else tiny.make(name)
    return Policy(made, tiny.tokenizer(), 0.7)


def together():
    return padded(*map(list, zip(*TOGETHER, strict=True)))


def gradients(chosen, logp):
    """Of a sum in which every token weighs differently."""
    chosen.model.zero_grad()
    (logp * torch.linspace(-1, 2, logp.numel()).view(logp.shape)).sum().backward()
    return {key: p.grad.clone() for key, p in chosen.model.named_parameters() if p.grad is not None}


def assert_close(found, expected, share=2e-5):
    assert found.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm() / len(expected) ** 0.5
    for key, right in expected.items():
        assert (found[key] - right).norm() <= share * (right.norm() + whole), key


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, *MORE, *UNFIT])
def test_packed_padded_and_alone_are_the_same(name):
    chosen = built(name)
    assert chosen.packs == (name not in UNFIT)
    assert name not in UNFIT or UNFIT[name][2] in chosen.padded_because
    ids, start, mask = together()
    rows = [naive(chosen.model, prompt, response, 0.7)[0] for prompt, response in TOGETHER]
    alone = torch.stack([torch.nn.functional.pad(row, (0, mask.shape[1] - len(row))) for row in rows])
    expected = gradients(chosen, alone)
    ways = {"own": {}, "shared": {"prompt_B": NUMBERS}, "again": {"prompt_B": NUMBERS, "recompute": True}}
    for how in ways.values():
        found = chosen.score(ids, start, mask, **how).logp_BT
        assert torch.allclose(found, alone, atol=2e-5)
        assert_close(gradients(chosen, found), expected)
    chosen.padded_because = "a test says so"
    found = chosen.score(ids, start, mask, NUMBERS).logp_BT
    assert torch.allclose(found, alone, atol=2e-5)
    assert_close(gradients(chosen, found), expected)


def test_a_model_whose_head_cannot_be_called_apart_is_scored_whole(monkeypatch):
    monkeypatch.setattr(policy_module, "head_comes_apart", lambda model: False)
    chosen = policy("gemma2-final-cap", 0.7)
    assert not chosen.apart
    assert not chosen.packs
    ids, start, mask = together()
    found = chosen.score(ids, start, mask, NUMBERS).logp_BT
    for i, (prompt, response) in enumerate(TOGETHER):
        assert torch.allclose(found[i, : len(response)], naive(chosen.model, prompt, response, 0.7)[0], atol=2e-5)


def test_wrong_states_are_noticed(monkeypatch):
    """Positions that are not those of the sequences: rotary attention does not mind, learned ones do."""
    original = architecture.pack

    def shifted(*args):
        found = original(*args)
        found.position_N.add_(3)
        return found

    monkeypatch.setattr(architecture, "pack", shifted)
    assert policy("llama").packs
    assert policy("gpt2").padded_because == "its states are not those of the plain forward pass"


def test_no_padding_and_no_prompt_twice_enter_a_linear_layer():
    chosen, seen = policy("qwen2-grouped"), []
    chosen.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape[:-1]))
    ids, start, mask = together()
    chosen.score(ids, start, mask)
    chosen.score(ids, start, mask, NUMBERS)
    chosen.padded_because = "a test says so"
    chosen.score(ids, start, mask)
    prompts = {tuple(prompt) for prompt, _ in TOGETHER}
    answers = sum(len(response) - 1 for _, response in TOGETHER)
    once = sum(map(len, prompts)) + answers
    assert seen == [(1, sum(len(p) for p, _ in TOGETHER) + answers), (1, once), (7, ids.shape[1] - 1)]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma3-window", "gpt2", "phi-bias"])
def test_recomputed_layers_give_the_same_gradient_and_keep_less(name, packs):
    chosen = policy(name)
    if not packs:
        chosen.padded_because = "a test says so"
    args, found, kept = (*together(), NUMBERS), [], []
    for recompute in (False, True):
        sizes = []

        def keep(x, sizes=sizes):
            sizes.append(x.numel() * x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logp = chosen.score(*args, recompute=recompute).logp_BT
        kept.append(sum(sizes))
        found.append((logp.detach(), gradients(chosen, logp)))
    assert kept[1] < kept[0] / 3
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_nothing_is_left_behind():
    chosen = policy("qwen2-grouped")
    before = chosen.model.config._attn_implementation
    logp = chosen.score(*together(), NUMBERS, recompute=True).logp_BT
    layer = chosen.model.model.layers[0]
    assert "forward" not in vars(layer)
    assert "forward" not in vars(chosen.model.model)
    layer.forward = own = layer.forward  # a forward of its own, which has to come back
    chosen.score(*together(), NUMBERS, recompute=True)
    assert vars(layer)["forward"] is own
    assert chosen.model.config._attn_implementation == before
    expected = gradients(chosen, chosen.score(*together(), NUMBERS).logp_BT)
    assert_close(gradients(chosen, logp), expected, 0)  # layers are computed anew in what they were computed in
    assert chosen.model.config._attn_implementation == before
    with pytest.raises(IndexError):
        chosen.score(together()[0] + 10**6, *together()[1:], NUMBERS, recompute=True)
    assert chosen.model.config._attn_implementation == before
    assert custom_attention._attend.get(None) is None
    assert not chosen.model.training


def test_a_head_in_chunks_is_the_head(monkeypatch):
    for name in ("gemma2-final-cap", "phi-bias", "granite-scale"):
        chosen = policy(name, 0.7)
        whole = chosen.score(*together(), NUMBERS)
        expected = gradients(chosen, whole.logp_BT)
        monkeypatch.setattr(policy_module, "CHUNK_ELEMENTS", 4 * tiny.VOCABULARY)
        cut = chosen.score(*together(), NUMBERS)
        assert torch.allclose(cut.logp_BT, whole.logp_BT, atol=1e-6)
        assert torch.allclose(cut.entropy_BT, whole.entropy_BT, atol=1e-6)
        assert_close(gradients(chosen, cut.logp_BT), expected, 1e-5)
        monkeypatch.undo()


def test_what_cannot_be_recomputed_is_refused(monkeypatch):
    class Other:
        pass

    chosen = policy("llama")
    monkeypatch.setattr(transformers.modeling_layers, "GradientCheckpointingLayer", Other)
    with pytest.raises(ValueError, match=r"^recompute: LlamaForCausalLM has no layers"):
        chosen.score(*together(), recompute=True)
