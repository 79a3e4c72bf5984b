"""From problems to tokens: templates, system prompts, chat templates; what is too long, and what is looked at."""

import json
from dataclasses import replace

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tiny
from rpg.distributed.context import RunContext
from rpg.models.policy import Policy
from rpg.rollout import Rollout
from rpg.run.auto import settled
from rpg.run.config import Config, EvalConfig, RolloutConfig, TaskConfig
from rpg.tasks import ENDLESS, Problem, Scorer, Task, load_task
from rpg.training.samples.choice import PromptChoice
from rpg.training.samples.collect import Collector, PromptTooLong, Sampler, encode_prompt
from rpg.training.setup import check_fit, check_train, held_out, make_scorer, method_of

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking){% endif %}<|assistant|>"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
)


def byte_tokenizer(chat=None, special=False):
    """Knows every byte, and <think> as a token, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    made.add_tokens([AddedToken(t, special=special) for t in ("<think>", "</think>")], special_tokens=special)
    made.chat_template = chat
    return made


@pytest.fixture(scope="module")
def model():
    return tiny.make("llama", vocab_size=300, max_position_embeddings=4096)


@pytest.fixture
def policy(model):
    return Policy(model, byte_tokenizer())


@pytest.fixture
def chatting(model):
    return Policy(model, byte_tokenizer(CHAT))


def settings(tokens=512, **task):
    rollout = RolloutConfig(max_prompt_tokens=tokens, prompts=2, samples=2)
    return settled(Config(task=TaskConfig(**task), rollout=rollout))


def text(policy, problem, config):
    return policy.tokenizer.decode(encode_prompt(policy, problem, config))


def test_the_template_of_the_run_goes_before_the_problems(policy):
    plain, boxed = Problem("1+1\n", "2"), Problem("1+1", "2", template="boxed")
    assert text(policy, plain, settings()) == "1+1\n"
    assert text(policy, boxed, settings()).startswith("1+1\n\nPlease reason")
    assert text(policy, boxed, settings(template="plain")) == "1+1"
    assert text(policy, plain, settings(template="Q: {prompt}\\boxed{}")) == "Q: 1+1\n\\boxed{}"
    asks_itself = Problem("1+1 Answer:", "2", template="wrapped")
    assert (
        text(policy, asks_itself, settings(template="boxed")) == text(policy, asks_itself, settings()) == "1+1 Answer:"
    )


def test_system_prompts_and_options_reach_the_chat_template(chatting):
    own, none = Problem("1+1", "2", system="Be brief."), Problem("1+1", "2")
    assert text(chatting, none, settings()) == "<|user|>1+1<|assistant|>"
    assert text(chatting, own, settings()) == "<|system|>Be brief.<|user|>1+1<|assistant|>"
    assert text(chatting, own, settings(system="Be long.")) == "<|system|>Be long.<|user|>1+1<|assistant|>"
    assert text(chatting, own, settings(system="")) == "<|user|>1+1<|assistant|>"
    quiet = settings(chat_options={"enable_thinking": False})
    assert text(chatting, none, quiet) == "<|user|>1+1(no thinking)<|assistant|>"
    assert text(chatting, none, settings(chat=False)) == "1+1"


def test_what_the_chat_template_refuses_is_one_line_before_anything_is_sampled(model, policy):
    picky = Policy(model, byte_tokenizer(NO_SYSTEM))
    problems = [Problem("1+1", "2")]
    assert check_fit(picky, problems, settings()) > 3
    for who, config, word in (
        (picky, settings(system="Be brief."), "System role not supported"),
        (policy, settings(system="Be brief."), "task.system"),
        (policy, settings(chat=True), "task.chat"),
        (policy, settings(template="boxd"), "Did you mean 'boxed'?"),
    ):
        for check in (check_fit, lambda *a: check_train(a[0], Task("t", a[1], a[1], None), a[2])):
            with pytest.raises(ValueError) as error:
                check(who, problems, config)
            assert word in str(error.value)
            assert "\n" not in str(error.value)


# ---- too long --------------------------------------------------------------------------------------------------------


def sized(*sizes):
    return [Problem("x" * size, "2") for size in sizes]


def task(train, test=()):
    return Task("t", train, list(test), lambda response, answer, prompt: 0.0, trusted=True)


def test_long_prompts_are_left_out_of_training_and_their_number_is_said(policy):
    said = []
    assert check_train(policy, task(sized(3, 90, 20, 100, 60)), settings(80), RunContext(warn=said.append)) == 60
    assert said == ["2 of 5 prompts are left out: they have more than rollout.max_prompt_tokens=80 tokens"]
    said.clear()
    assert check_train(policy, task(sized(3, 80)), settings(80), RunContext(warn=said.append)) == 80
    assert said == []
    with pytest.raises(PromptTooLong, match=r"90 tokens, more than rollout\.max_prompt_tokens=80"):
        check_train(policy, task(sized(90, 85)), settings(80))
    with pytest.raises(ValueError, match="no problems to train on"):
        check_train(policy, task([]), settings(80))


def test_a_long_prompt_that_is_held_out_is_an_error(policy):
    assert check_fit(policy, sized(3, 80), settings(80)) == 80
    with pytest.raises(PromptTooLong, match=r"rollout\.max_prompt_tokens=80"):
        check_fit(policy, sized(3, 81), settings(80))


def test_prompt_and_response_fit_into_the_model(model):
    small = Policy(tiny.make("llama", vocab_size=300, max_position_embeddings=100), byte_tokenizer())
    for check in (lambda c: check_fit(small, sized(21), c), lambda c: check_train(small, task(sized(21)), c)):
        check(replace(settings(), rollout=RolloutConfig(max_new_tokens=79)))
        with pytest.raises(ValueError, match=r"21 tokens and rollout\.max_new_tokens=80 do not fit into the 100"):
            check(settings())


class Counting:
    """A policy that counts what it encodes."""

    def __init__(self, policy):
        self.policy, self.count = policy, 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def encode(self, *args, **options):
        self.count += 1
        return self.policy.encode(*args, **options)


def test_of_a_mixture_all_parts_that_have_an_end_are_looked_at(policy, tmp_path):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (*range(1, 200), 300, 400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed, said = load_task(f"0.001*{tmp_path}/a.jsonl + 0.999*arithmetic"), []
    assert len(mixed.train) >= ENDLESS
    assert check_train(policy, mixed, settings(250, template="plain"), RunContext(warn=said.append)) >= 190
    assert len(said) <= 1  # the two long ones, unless they are held out
    assert check_train(policy, mixed, settings(500, template="plain")) >= 199


@pytest.mark.parametrize("chat", [None, CHAT])
def test_only_what_may_be_the_longest_is_encoded(model, chat):
    policy = Counting(Policy(model, byte_tokenizer(chat)))
    many = [*sized(*range(1, 200)), Problem("é" * 110, "2"), Problem("x", "2", system="y" * 30 if chat else "")]
    expected = max(len(encode_prompt(policy, problem, settings())) for problem in many)
    policy.count = 0
    assert check_train(policy, task(many), settings()) == expected
    assert policy.count < 80
    around = len(policy.encode(""))  # many bytes in few tokens, and somewhat more tokens than that in few bytes
    few = [Problem("<think>" * 40, "2"), Problem("x" * (40 + around // 2), "2")]
    assert check_train(policy, task(few), settings()) == 40 + around // 2 + around


def test_where_the_tokenizer_does_not_know_all_everything_is_looked_at():
    policy = Counting(Policy(tiny.make("llama"), tiny.tokenizer()))
    known = [Problem(tiny.text([3] * n), "2") for n in range(1, 30)]
    config = replace(settings(), rollout=RolloutConfig(max_new_tokens=20))
    assert check_train(policy, task(known), config) == 29
    assert policy.count >= 29
    with pytest.raises(ValueError, match="does not know all characters of the prompt 'w3 é'"):
        check_train(policy, task([*known, Problem("w3 é", "2")]), config)
    with pytest.raises(ValueError, match="does not know all characters"):
        check_fit(policy, [Problem("w3 é", "2")], config)


def test_held_out_sets_by_name():
    config = Config(eval=EvalConfig(problems=3))
    one = Task("sums", sized(1), sized(*range(1, 9)), None)
    assert {name: len(problems) for name, problems in held_out(one, config).items()} == {"sums": 3}
    two = Task("sums", sized(1), {"aime24": sized(1, 2), "aime25": sized(*range(1, 6))}, None)
    assert {name: len(problems) for name, problems in held_out(two, config).items()} == {"aime24": 2, "aime25": 3}
    for test, word in (([], "task 'arithmetic'"), ({}, "task"), ({"a": sized(1), "b": []}, "test set 'b'")):
        with pytest.raises(ValueError, match=f"{word}.*no held-out problems: name some with --task.test"):
            held_out(Task("t", sized(1), test, None), config)


# ---- what is sampled -------------------------------------------------------------------------------------------------


class Engine:
    """Writes the same to every prompt."""

    def __init__(self, tokens):
        self.tokens, self.prompts = tokens, []

    def generate(self, prompts, n=1, *args, **options):
        self.prompts += prompts
        return [[Rollout(self.tokens, [-1.0] * len(self.tokens), True)] * n for _ in prompts]


def collector(policy, train, config, scorer, tokens=(5, 1)):
    config = replace(config, algorithm="grpo", rollout=replace(config.rollout, dynamic=False))
    return Collector(config, method_of(config), Sampler(policy, Engine(list(tokens)), scorer, config), task(train))


def zero(response, answer, prompt):
    return 0.0


def test_the_collector_leaves_out_what_is_too_long(policy):
    train = sized(3, 90, 4, 100)
    with Scorer(zero, trusted=True) as scorer:
        made = collector(policy, train, settings(80), scorer)
        for step in range(4):
            made.collect(step)
        assert sorted(map(len, made.sampler.engine.prompts)) == [3] * 4 + [4] * 4  # each once in every pass
        again = collector(policy, train, settings(80), scorer)
        again.collect(0)
        again.collect(1)
        resumed = collector(policy, train, settings(80), scorer)
        resumed.position = replace(again.position)
        resumed.collect(2)
        assert resumed.sampler.engine.prompts == made.sampler.engine.prompts[4:6]


def test_prompts_that_are_left_out_by_choice_are_not_taken_for_too_long(policy):
    """One of three fits, and is sampled rarely: that is no reason to give up."""
    with Scorer(zero, trusted=True) as scorer:
        made = collector(policy, sized(90, 3, 100), settings(80), scorer)
        made.choice = PromptChoice(made.position, 0, 2, again=True)
        for step in range(1, 12):
            made.collect(step)
        assert {len(ids) for ids in made.sampler.engine.prompts} == {3}


class Endless(list):
    def __len__(self):
        return ENDLESS

    def __getitem__(self, index):
        return list.__getitem__(self, index % list.__len__(self))


def test_endless_prompts_that_are_all_too_long_are_an_error(policy):
    with Scorer(zero, trusted=True) as scorer:
        with pytest.raises(PromptTooLong):
            collector(policy, Endless(sized(90)), settings(80), scorer).collect(0)
        made = collector(policy, Endless(sized(90, 3, 4)), settings(80), scorer)
        made.collect(0)
        assert [len(ids) for ids in made.sampler.engine.prompts] == [3, 4]


@pytest.mark.parametrize("special", [False, True])
def test_the_reward_sees_the_thinking_tags(model, special):
    policy = Policy(model, byte_tokenizer(special=special))
    response = policy.tokenizer("<think>6*7</think> \\boxed{42}")["input_ids"]
    config = settings(rewards={"correct": 1.0, "format": 0.5}, template="think")
    problems = [Problem("6*7", "42", source="a"), Problem("7*6", "42", source="b")]
    with make_scorer(config, task(problems)) as scorer:
        made = collector(policy, problems, config, scorer, [*response, 1, 0]).collect(0)
    assert made.sampled[0].responses[0].text == "<think>6*7</think> \\boxed{42}"
    metrics = made.metrics()
    assert (metrics["reward/part/format"], metrics["reward/part/correct"]) == (1.0, 0.0)
    assert metrics["reward/mean"] == 0.5
    assert (metrics["reward/solved"], metrics["reward/solved/a"]) == (0.0, 0.0)
    with make_scorer(config, task(problems)) as scorer:
        short = policy.tokenizer("\\boxed{42}")["input_ids"]  # the form of the run's template, not of the problems'
        found = collector(policy, problems, config, scorer, short).collect(0)
    assert found.metrics()["reward/part/format"] == 0.0
    row = made.samples(1, None)[0]
    assert (row["solved"], row["parts"]) == (False, {"correct": 0.0, "format": 1.0})
