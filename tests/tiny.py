"""Small random models of many architectures, and a tokenizer of 40 words."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA3 = {"head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "hidden_size": 48, "num_attention_heads": 6}),  # in threes
    "qwen2-grouped": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral-window": ("MistralConfig", {"head_dim": 8, "sliding_window": 5}),
    "gemma3-window": ("Gemma3TextConfig", {**GEMMA3, "sliding_window": 4}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "phi-bias": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "granite-scale": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere-scale": ("CohereConfig", {"logit_scale": 0.3}),
    "gemma2-final-cap": (
        "Gemma2Config",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "sliding_window": 4},
    ),
}


def make(name="llama", spread=0.25, dtype=torch.float32, config=None, **settings):
    """A model with weights wide enough for its predictions to differ from place to place."""
    kind, own = (config, {}) if config else ARCHITECTURES[name]
    random = torch.random.get_rng_state()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**COMMON, **own, **settings}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, spread)
            elif parameter.dim() == 1 and not parameter.any():  # biases
                parameter.normal_(0, 0.1)
    torch.random.set_rng_state(random)
    made.generation_config.eos_token_id = 1
    return made.to(dtype).eval()


def tokenizer(chat=None):
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = chat
    return made


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def groups(policy, seed=0, sizes=(4, 3, 5), longest=9, noise=0.3, kept=False):
    """Groups of random responses of all lengths, whose log-probabilities are the policy's with some noise.

    With ``kept`` each token was drawn from a random set, over which they are.
    """
    from rpg.kernels.kept import Kept
    from rpg.rollout import KeptIds, Rollout
    from rpg.tasks import Problem
    from rpg.training.samples.collect import Group, Response

    g, of_sets = (torch.Generator().manual_seed(seed) for _ in range(2))

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=g))

    made = []
    for size in sizes:
        prompt = [number(2, VOCABULARY) for _ in range(number(1, 7))]
        responses = []
        for i in range(size):
            tokens = [number(2, VOCABULARY) for _ in range(number(1, longest + 1))]
            ids, mask = torch.tensor([prompt + tokens]), torch.ones(1, len(tokens), dtype=torch.bool)
            sets = None
            if kept:
                kept_TV = torch.rand(len(tokens), VOCABULARY, generator=of_sets) < 0.15
                kept_TV[torch.arange(len(tokens)), tokens] = True
                sets = Kept(kept_TV.nonzero()[:, 1].int(), kept_TV.sum(-1))
            with torch.no_grad():
                logp = policy.score(ids, torch.tensor([len(prompt)]), mask, kept=sets).logp_BT[0]
            logp = logp + noise * torch.randn(len(tokens), generator=g)
            reward = float(torch.rand((), generator=g)) if i else 1.0
            told = None if sets is None else KeptIds(sets.ids_K.numpy(), sets.count_N.int().numpy())
            responses.append(Response(Rollout(tokens, logp.tolist(), True, told), text(tokens), reward))
        made.append(Group(Problem(text(prompt), ""), prompt, responses, greedy=0.5))
    return made


def with_bytes(folder):
    """A folder with a model that knows every text: its tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    made.save_pretrained(folder)
    make(vocab_size=len(alphabet) + 2, max_position_embeddings=2048).save_pretrained(folder)
    return folder
