"""rpg sample and rpg chat: prompts put as the task puts its problems, responses judged, a reply that streams."""

import contextlib
import io
import json
import os
import random
import sys

import pytest

import tiny
from rpg import api, cli
from rpg.ask import responder as responder_module
from rpg.ask.question import question
from rpg.ask.responder import Pieces, Responder
from rpg.commands import sample
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine, Sampling
from rpg.run.auto import settled
from rpg.run.config import Config
from rpg.tasks.sources.builtin import LARGEST, arithmetic, ask_mixed, terms_of

CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def builtin():
    return Policy.load("builtin")


@pytest.fixture
def model(builtin, monkeypatch):
    """The built-in model, loaded once for all tests."""
    monkeypatch.setattr(responder_module.Policy, "load", lambda *args, **options: builtin)


def rpg(*argv, stdin=""):
    """(exit code, stdout, stderr)"""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([str(a) for a in argv])
    except SystemExit as exit:
        code = exit.code or 0
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


def sampled(*argv, **options):
    code, out, err = rpg("sample", *argv, "--json", **options)
    assert code == 0, err
    return json.loads(out)


# ---- rpg sample ------------------------------------------------------------------------------------------------------


def test_responses_differ_and_are_judged(model, builtin):
    first = sampled("builtin", "7 + 3*8 - 4 =")
    assert first["prompt"] == "7+3*8-4\n"  # as the task writes it, its last newline too
    texts = [r["text"] for r in first["responses"]]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    for response in first["responses"]:
        assert response["reward"] == float(response["text"].endswith("answer 27")) == response["solved"]
        assert response["logp"] < 0
        assert response["tokens"] > 5
        assert response["finished"]
    assert {r["reward"] for r in first["responses"]} == {0.0, 1.0}
    assert sampled("builtin", "-", stdin="7+3*8-4\n") == first
    assert sampled("builtin", "7+3*8-4", "--seed", 1)["responses"] != first["responses"]


def test_stdin_that_is_not_read_is_said(model):
    for text, said in (("9+9-1\n", 1), ("", 0)):
        reader, writer = os.pipe()
        os.write(writer, text.encode())  # and left open: nothing waits for its end
        before = sys.stdin
        with open(reader) as sys.stdin:
            assert sample._waiting(sys.stdin) == bool(said)
            err = io.StringIO()
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(["sample", "builtin", "--n", "1", "--max-new-tokens", "2"]) == 0
        sys.stdin = before
        os.close(writer)
        assert err.getvalue().count("stdin is not read: give - to read the prompt from stdin") == said
    code, out, err = rpg("sample", "builtin", "-", stdin="\n")
    assert (code, out, err) == (2, "", "rpg sample: -: stdin is empty, there is no prompt\n")


def test_temperature_0_is_greedy_and_has_the_models_log_probability(model, builtin):
    one, two = sampled("builtin", "7+3*8-4", "--temperature", 0, "--n", 2)["responses"]
    assert one == two
    ids = builtin.encode("7+3*8-4\n")
    (likely,) = NativeEngine(builtin.model, builtin.tokenizer).generate([ids], 1, 80, top_k=1, temperature=1.0)[0]
    assert builtin.decode(likely.tokens) == one["text"]
    everything = NativeEngine(builtin.model, builtin.tokenizer).generate([ids], 200, 80)[0]
    (logp,) = {round(sum(r.logp), 3) for r in everything if r.tokens == likely.tokens}
    assert one["logp"] == pytest.approx(logp, abs=2e-3)


def test_what_is_printed_says_it_all_and_the_model_is_announced_first(model):
    code, out, err = rpg("sample", "builtin", "7+3*8-4", "--n", 2)
    assert code == 0
    assert err == "rpg: loading builtin\n"
    assert [line[:6] for line in out.splitlines() if line.startswith("──")] == ["── 1/2", "── 2/2"]
    assert "log-probability -" in out
    assert "reward 1" in out
    assert "tokens" in out
    shown = rpg("sample", "builtin", "--n", 1)[1]  # no prompt: a held-out problem, which is shown
    assert "+" in shown.splitlines()[0] or "make" in shown.splitlines()[0]
    assert shown != rpg("sample", "builtin", "--n", 1, "--seed", 5)[1]


def test_equal_responses_are_shown_once_with_their_number(model):
    argv = ("builtin", "7+3*8-4", "--n", 12, "--temperature", 0.3)
    texts = [response["text"] for response in sampled(*argv)["responses"]]
    assert len(texts) == 12
    assert 1 < len(set(texts)) < 12
    heads = [line for line in rpg("sample", *argv)[1].splitlines() if line.startswith("──")]
    assert len(heads) == len(set(texts))
    for text, head in zip(dict.fromkeys(texts), heads, strict=True):
        count = f"×{texts.count(text)}  " if texts.count(text) > 1 else ""
        assert head.startswith(f"── {texts.index(text) + 1}/12  {count}log-probability -")


def test_what_the_built_in_model_knows_is_said(model):
    for command in ("sample", "chat"):
        assert "builtin knows sums: 3 to 6 whole numbers from 1 to 20" in rpg(command, "--help")[1]
    some = [arithmetic(random.Random(seed)).prompt.strip() for seed in range(2000)]
    terms = [terms_of(prompt) for prompt in some]
    assert {len(each[::2]) for each in terms} == {3, 4, 5, 6}
    assert {number for each in terms for number in each[::2]} == {str(n) for n in range(1, 21)}
    assert {operator for each in terms for operator in each[1::2]} == set("+-*")
    assert LARGEST == 199


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["7+3", "--n", 0], "--n must be at least 1; got 0"),
        (["7+3", "--seed", -1], "--seed must be at least 0; got -1"),
        (["hello"], "does not know all characters of the prompt 'hello"),
        (["7+3", "--temperature", -1], "temperature must be at least 0"),
        (["7+3\n", "--raw", "--answer", "10"], "an answer is judged by a task: name it with --task"),
        (["--raw"], "give a prompt"),
        (["7+3", "--optim.lr", "1"], "--optim.lr has no effect here: leave it out"),
        (["7+3", "--task.nme", "x"], "unknown option --task.nme; did you mean --task.name?"),
        (["1+" * 200 + "1"], "do not fit into the 256 of the model"),
    ],
)
def test_a_mistake_is_one_line(model, argv, says):
    code, out, err = rpg("sample", "builtin", *argv)
    assert code == 2
    assert not out
    assert says in err.splitlines()[-1]


def test_a_models_text_cannot_drive_the_terminal(model, monkeypatch):
    hostile = "a\x1b]0;owned\x07b\tc\nd\r\u202ee"
    monkeypatch.setattr(responder_module.Policy, "decode", lambda self, tokens: hostile if tokens else "")
    out = rpg("sample", "builtin", "7+3*8-4", "--n", 1)[1] + rpg("chat", "builtin", stdin="7+3*8-4\n")[1]
    assert out.count("a\\x1b]0;owned\\x07b\tc\nd\\r\\u202ee") == 2
    assert not set("\x1b\x07\r\u202e") & set(out)


# ---- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prompt", "answer"),
    [
        ("2 * 3*4 -30", "2*3*4-30\n", "-6"),
        ("7", "7\n", "7"),
        (" make 24  from 3 5 9\n", "make 24 from 3 5 9\n", "24"),
        ("7+", None, None),
        ("2**9", None, None),
        ("9" * 5000, None, None),
        ("make 24 from", None, None),
    ],
)
def test_the_builtin_tasks_work_out_what_they_are_asked(text, prompt, answer):
    problem = ask_mixed(text)
    assert (problem and problem.prompt, problem and problem.answer) == (prompt, answer)


def test_a_text_is_a_problem_of_the_task_or_is_put_like_one(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"what is {n}?\n\n", "answer": str(n)}) + "\n" for n in range(30)))
    config, told = Config(), []

    def ask(text, answer=None, task=str(data)):
        asked = question(config, task, text, answer, 3, told.append)
        return asked.problem.prompt, asked.problem.answer, asked.judge is not None

    assert ask("what is 7?") == ("what is 7?\n\n", "7", True)
    assert ask("what is 99?")[::2] == ("what is 99?\n\n", False)
    assert ask("what is 99?", "99") == ("what is 99?\n\n", "99", True)
    assert ask(None)[2]
    assert ask("how?", task=None) == ("how?", "", False)
    with pytest.raises(ValueError, match="leave --answer out"):
        ask("how?", "so", task=f"0.5*{data} + 0.5*arithmetic")
    assert not told
    assert ask("what is 7?", task=str(tmp_path / "gone.jsonl"))[2] is False
    assert "without rewards" in told[0]
    assert "gone.jsonl" in told[0]
    with pytest.raises(ValueError, match=r"gone\.jsonl"):
        ask(None, task=str(tmp_path / "gone.jsonl"))


def test_a_run_is_sampled_as_it_was_trained(tmp_path, builtin, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    settings = "task: {name: countdown, template: 'Q {prompt}'}\nrollout: {temperature: 0.7, top_p: 0.9}\n"
    (run / "config.yaml").write_text(settings)
    (run / "run.id").touch()
    monkeypatch.setattr(api, "checkpoint_folder", lambda folder, which, warn: folder / f"{which}")
    config, temperature, task = api.sampling_config(run, max_new_tokens=7, checkpoint="last")
    assert (config.model, temperature, task) == (str(run / "last" / "model"), 0.7, "countdown")
    assert (config.rollout.top_p, config.rollout.max_new_tokens, config.task.template) == (0.9, 7, "Q {prompt}")
    config, temperature, task = api.sampling_config(run, temperature=0.0, task="arithmetic")
    assert (temperature, task, config.task.name) == (0.0, "arithmetic", "arithmetic")
    config, _, task = api.sampling_config("org/name")
    assert (task, config.rollout.max_new_tokens) == (None, 1024)


# ---- rpg chat --------------------------------------------------------------------------------------------------------


def test_a_line_from_a_pipe_is_a_turn(model):
    code, out, err = rpg("chat", "builtin", "--temperature", 0, stdin="7+3*8-4\n\nhello\n3+4\n/quit\n9+9\n")
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith("answer")]) == 2
    assert [line for line in out.splitlines() if line.startswith("> ")] == ["> 7+3*8-4", "> hello", "> 3+4"]
    assert err.count("each line is a prompt by itself") == 1
    assert err.count("does not know all characters") == 1


@pytest.fixture
def talker(monkeypatch):
    policy = Policy(tiny.make(), tiny.tokenizer(CHAT))
    monkeypatch.setattr(responder_module.Policy, "load", lambda *args, **options: policy)
    return policy


def test_a_conversation_remembers_until_new(talker, monkeypatch):
    seen = []
    encode = Policy.encode_chat

    def noted(self, said, *rest):
        seen.append([(m["role"], m["content"]) for m in said])
        return encode(self, said, *rest)

    monkeypatch.setattr(Policy, "encode_chat", noted)
    lines = "w3 w4\nw5\n/new\nw6\n"
    code, out, err = rpg("chat", "any/model", "--max-new-tokens", 3, stdin=lines)
    assert code == 0, err
    first = out.splitlines()[1]
    assert seen == [
        [("user", "w3 w4")],
        [("user", "w3 w4"), ("assistant", first), ("user", "w5")],
        [("user", "w6")],
    ]
    many = rpg("chat", "any/model", "--max-new-tokens", 30, stdin="w3\n" * 9)
    assert many[0] == 0
    assert "/new forgets what was said" in many[2]


def test_ctrl_c_stops_a_response_and_the_conversation_goes_on(talker, monkeypatch):
    stream, turns = NativeEngine.stream, []

    def interrupted(self, prompt, *rest):
        turns.append(len(prompt))
        tokens = stream(self, prompt, *rest)
        yield next(tokens)
        if len(turns) == 1:
            raise KeyboardInterrupt
        yield from tokens

    monkeypatch.setattr(NativeEngine, "stream", interrupted)
    code, out, _ = rpg("chat", "any/model", "--max-new-tokens", 4, stdin="w3\nw4\n")
    assert code == 0
    assert out.splitlines()[1].endswith(" …")
    assert len(turns) == 2


@pytest.mark.parametrize("sampling", [Sampling(20), Sampling(20, 0.0), Sampling(12, 0.8, 0.9, 5), Sampling(1)])
def test_a_stream_has_the_tokens_that_generate_gives(builtin, sampling):
    engine = NativeEngine(builtin.model, builtin.tokenizer)
    ids, how = builtin.encode("3+4*5\n"), {"top_p": sampling.top_p, "top_k": sampling.top_k}
    for seed in range(4):
        ((whole,),) = engine.generate([ids], 1, sampling.max_new_tokens, sampling.temperature, seed, **how)
        assert list(engine.stream(ids, sampling, seed)) == whole.tokens


def test_pieces_are_the_text_and_no_character_is_cut():
    text = "naïve 日本 🙂 end"
    tokens = list(text.encode())

    def decode(tokens):
        return bytes(tokens).decode(errors="replace")

    pieces = Pieces(decode)
    parts = [pieces.add(token) for token in tokens] + [pieces.rest()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    cut = Pieces(decode)
    assert cut.add(0xE6) == ""
    assert cut.rest() == "\ufffd"


def test_a_response_is_cut_where_the_context_ends(talker):
    made = Responder(settled(Config()), talker)
    assert len(list(made.engine.stream([5] * 60, made._sampling([5] * 60), 0))) <= 4
    with pytest.raises(ValueError, match="none is left to answer"):
        made._sampling([5] * 64)
