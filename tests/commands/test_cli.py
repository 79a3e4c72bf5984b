"""The command line, end to end: what it prints, what it writes, and how it fails."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import rpg
from rpg import cli
from rpg.audit import SCENARIOS, AuditRow, Subject, resolve
from rpg.commands.algorithms import _show_algorithm
from rpg.loss.registry import sources

SOURCE = str(Path(rpg.__file__).parents[1])

LOSSES = """
import torch
print("a user's module may print")

def right(logp, old_logp, advantages, mask, ref_logp, beta):
    w = (logp - old_logp).exp()
    return ((-w * advantages[:, None] + beta * w * (logp - ref_logp)) * mask).sum() / mask.sum()

def wrong(logp, old_logp, advantages, mask, ref_logp, beta):
    k3 = (ref_logp - logp).exp() - 1 - (ref_logp - logp)
    return ((-(logp - old_logp).exp() * advantages[:, None] + beta * k3) * mask).sum() / mask.sum()

def clipped(logp, old_logp, advantages, mask, **rest):
    w, a = (logp - old_logp).exp(), advantages[:, None]
    return (-torch.min(w * a, w.clamp(0.8, 1.2) * a) * mask).sum() / mask.sum()

def undefined(logp, old_logp, advantages, mask):
    return (logp * mask).sum() * float("nan")

def takes_two(x, y):
    return x.sum() @ y

def constant(logp, old_logp, advantages, mask):
    return old_logp.sum()

def shouts(logp, old_logp, advantages, mask):
    raise RuntimeError("first line\\nsecond line")

number = 3
"""


@pytest.fixture
def losses(tmp_path):
    path = tmp_path / "my_losses.py"
    path.write_text(LOSSES)
    return str(path)


def process(*argv, **options):
    env = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rpg.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, timeout=300, **options)


def inside(*argv):
    """(exit code, stdout, stderr) of the command run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as exit:
            code = exit.code or 0
    return code, out.getvalue(), err.getvalue()


# ---- audit: what it finds --------------------------------------------------------------------------------------------


def test_json_on_stdout_is_all_that_is_there_and_complete(losses):
    done = process("audit", "rpg-urkl", "gspo", f"{losses}:right", f"{losses}:wrong", "--seeds", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    about = {"command", "date", "versions", "subjects", "seeds", "beta", "drift", "messages"}
    assert set(found) == about | {"rows", "box", "truncated", "names", "inside_clip"}
    missing = "the weight w is missing on the KL (k3, as GRPO was published)"
    assert found["names"] == {f"{losses}:wrong": [missing]}
    assert [s["names"] for s in found["subjects"]] == [[], [], [], [missing]]
    assert (found["seeds"], found["beta"], found["messages"]) == (2, 0.1, [])
    assert found["versions"]["rpg"] == rpg.__version__
    assert found["command"].startswith("rpg audit rpg-urkl gspo ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])

    assert {frozenset(row) for row in found["rows"]} == {frozenset(f.name for f in fields(AuditRow))}
    settings = [(r["name"], r["scenario"], r["lengths"], r["objective"]) for r in found["rows"]]
    assert len(set(settings)) == len(settings) == 6 * (2 + 3 + 2 + 2), "gspo has a third objective, its own"
    worst: dict[str, float] = {}
    for row in found["rows"]:
        if row["own"]:
            worst[row["name"]] = max(row["worst_bias"], worst.get(row["name"], 0.0))
    assert worst["rpg-urkl"] < 1e-10
    assert worst[f"{losses}:right"] < 1e-10
    assert worst[f"{losses}:wrong"] > 0.05
    assert [s["right"] for s in found["subjects"]] == ["everywhere", "everywhere", "everywhere", "nowhere"]
    assert {s["source"] for s in found["subjects"]} == {f"rpg {rpg.__version__}", "user"}
    assert {s["dtype"] for s in found["subjects"]} == {"float64"}
    assert [len(s["feeds"]) for s in found["subjects"]] == [1, 1, 3, 3]
    assert len(found["box"]) == 4 * 2
    assert len(found["truncated"]) == 3 * (1 + 1 + 3 + 3)


@pytest.mark.parametrize(
    ("names", "strict", "code"),
    [(["right"], True, 0), (["wrong"], True, 1), (["wrong"], False, 0), (["right", "wrong"], True, 1)],
)
def test_strict_fails_on_a_biased_loss_only(losses, names, strict, code):
    argv = ["audit", *(f"{losses}:{name}" for name in names), "--seeds", "1", *(["--strict"] if strict else [])]
    got, out, err = inside(*argv)
    assert got == code
    assert all(f"my_losses.py:{name}" in out for name in names)
    assert (f"{losses}:wrong" in err) == (code == 1)


def test_a_clip_is_noticed_and_a_small_drift_stays_inside_it(losses):
    argv = ["audit", f"{losses}:clipped", "--divergence", "none", "--strict"]
    code, _, err = inside(*argv)
    assert code == 1
    assert re.search(r"\d+% of its tokens do not answer to the reward .*--drift 0.05", err)
    code, _, err = inside(*argv, "--drift", "0.05")
    assert code == 0
    assert "do not answer" not in err
    assert "do not answer" not in inside("audit", f"{losses}:wrong", "--seeds", "1")[2]


def test_strict_over_every_rpg_preset_passes():
    code, out, err = inside("audit", "rpg-*", "--strict", "--seeds", "2")
    assert (code, err) == (0, "")
    total = sum(name.startswith("rpg-") for name in rpg.algorithms())
    assert out.startswith(f"All {total} losses have the exact gradient in every setting.\n")
    assert f"inside their clip, {total} of {total} are exact; under top-p 0.9 sampling {total}." in out


def test_a_loss_of_yours_is_told_what_top_p_does_to_it(losses):
    out = " ".join(inside("audit", f"{losses}:right", "--seeds", "1")[1].split())
    assert (
        "under top-p 0.95, 0.9, 0.7: exact with current, old and ref over the tokens that the sampler could draw; "
        in out
    )
    assert re.search(
        r"[\d.]+ %, [\d.]+ %, [\d.]+ % with current, old and ref over the whole vocabulary; [\d.]+ %, ", out
    )


def test_strict_does_not_pass_what_is_undefined(losses):
    code, out, _ = inside("audit", f"{losses}:undefined", "--seeds", "1", "--strict", "--json", "-")
    assert code == 1
    assert {row["bias"] for row in json.loads(out)["rows"]} == {None}, "JSON has no nan"
    assert "nan" in inside("audit", f"{losses}:undefined", "--seeds", "1")[1]


def test_a_stated_divergence_and_objective_are_what_it_is_judged_by(losses):
    def worst(*options):
        found = json.loads(inside("audit", f"{losses}:right", "--seeds", "1", "--json", "-", *options)[1])
        return max(row["bias"] for row in found["rows"] if row["own"])

    assert worst() < 1e-10
    assert worst("--divergence", "urkl") < 1e-10
    assert worst("--divergence", "fkl") > 0.01
    assert worst("--objective", "sequence") > 0.05
    assert worst("--beta", "0.5") < 1e-10


# ---- audit: what it shows --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_presets():
    return inside("audit", "--seeds", "1", "--verbose")


def test_the_table_of_all_presets_fits_a_pipe(all_presets):
    code, out, _ = all_presets
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert not re.search(r"[ \t]$", out, re.MULTILINE)
    assert "\x1b" not in out
    main = out[: out.index("\nright ")]
    for name in rpg.algorithms():
        assert re.search(rf"^ +{re.escape(name)} ", main, re.MULTILINE), name


def test_the_table_says_which_losses_are_right_and_where(all_presets):
    _, out, _ = all_presets
    lines = {name: line for line in reversed(out.splitlines()) if (name := line.strip().partition(" ")[0])}
    assert re.search(r"✓ everywhere +urkl, token( +exact){4} +[\d.]+ +exact$", lines["rpg-reinforce-urkl"])
    assert re.search(r"✗ nowhere +rkl, token( +[\d.]+ %){4} +[\d.]+ +[\d.]+ %$", lines["grpo"])
    assert re.search(r"~ fixed lengths +urkl, token +exact +[\d.]+ %( +exact){2} ", lines["grpo-corrected"])
    assert re.search(r"~ on-policy +no KL, seq\.( +[\d.]+ %){2} +– +[\d.]+ % +– +[\d.]+ %$", lines["rloo"])
    right = sum("✓ everywhere" in line for line in lines.values())
    assert out.startswith(f"{right} of {len(rpg.algorithms())} losses have the exact gradient")


def test_every_column_is_explained(all_presets):
    _, out, _ = all_presets
    columns = ("right", "ascends", "off policy", "varied lengths", "KL term", "in the box", "KL noise", "top-p 0.9")
    details = (
        "on-policy",
        "ref=old",
        "three policies",
        "sequence",
        "variance",
        "cut",
        "left",
        "apart",
        "engine's old 0.9",
    )
    for title in (*columns, *details, "top-p 0.95", "top-p 0.7", "exact"):
        assert re.search(rf"^{title} {{2,}}\S", out, re.MULTILINE), title


def test_a_real_pipe_gets_plain_text_of_at_most_100_columns(losses):
    done = process("audit", "rpg-urkl", f"{losses}:wrong", "--seeds", "1")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "my_losses.py:wrong" in done.stdout
    assert "\x1b" not in done.stdout


def fake_peers(verl_python=None):
    grpo = resolve("grpo")
    peer = Subject(
        name="liger grpo",
        source="liger-kernel 0.8.5",
        divergence="rkl",
        objective="token",
        note="a setting; 1/|y| remains",
        dtype=torch.float32,
        coefficients=grpo.coefficients,
        clipped=grpo.clipped,
    )
    sequence = replace(peer, name="trl rloo", source="trl 1.16.0", objective="sequence")
    return [peer, sequence], [f"verl is not installed ({verl_python})"]


def test_peers_are_grouped_by_source_with_version_and_type(monkeypatch):
    monkeypatch.setattr("rpg.audit.peers.peers", fake_peers)
    code, out, _ = inside("audit", "ppo", "--peers", "--verl-python", "/some/python", "--seeds", "1", "--verbose")
    assert code == 0
    at = [out.index(text) for text in (f"rpg {rpg.__version__}", "\n   ppo", "Liger 0.8.5 (float32)", "TRL 1.16.0")]
    assert at == sorted(at)
    assert "not audited: verl is not installed (/some/python)" in out
    assert "liger grpo: a setting; 1/|y| remains" in out
    assert re.search(r"^ +rloo .*rkl, seq\.", out, re.MULTILINE)
    assert re.search(r"^ +grpo .*rkl, token", out, re.MULTILINE)
    found = json.loads(inside("audit", "ppo", "--peers", "--seeds", "1", "--json")[1])
    assert [s["dtype"] for s in found["subjects"]] == ["float64", "float32", "float32"]
    assert found["versions"]["liger-kernel"] == "0.8.5"


def test_files_are_written_and_agree(tmp_path, monkeypatch):
    monkeypatch.setattr("rpg.audit.peers.peers", fake_peers)
    paths = {kind: tmp_path / f"audit.{kind}" for kind in ("json", "html", "svg", "markdown")}
    flags = [item for kind, path in paths.items() for item in (f"--{kind}", path)]
    code, out, err = inside("audit", "rpg-urkl", "grpo", "--peers", "--seeds", "1", *flags)
    assert code == 0
    assert "rpg-urkl" in out
    assert [line.split()[0] for line in err.splitlines()] == ["wrote"] * 4
    assert json.loads(paths["json"].read_text())["subjects"][0]["name"] == "rpg-urkl"
    assert paths["html"].read_text().startswith("<!doctype html>")
    assert paths["svg"].read_text().startswith("<svg")
    text = paths["markdown"].read_text()
    assert "rpg audit rpg-urkl grpo --peers" in text
    assert f"rpg {rpg.__version__}, torch {torch.__version__}" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    cells = [len(re.split(r"(?<!\\)\|", line)) for line in tables]
    assert len(tables) == 3 * 2 + 4
    assert cells == sorted(cells), "the rows of each table have its header's cells; peers have one more, the setting"
    assert len(set(cells)) == 2
    assert "a setting; 1/\\|y\\| remains" in text


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("audit gropo", "Did you mean 'grpo'"),
        ("audit no_such_module:loss", "cannot import 'no_such_module'"),
        ("audit no_such_file.py:loss", "no_such_file.py"),
        ("audit {dir}/syntax.py:loss", "syntax.py"),
        ("audit {dir}/raises.py:loss", "while importing"),
        ("audit {mine}:wright", "Did you mean 'right'"),
        ("audit {mine}:number", "neither a loss nor a callable"),
        (
            "audit {mine}:takes_two",
            "takes (x, y), but a loss is called with (logp, old_logp, advantages, mask, ref_logp)",
        ),
        ("audit {mine}:constant", "depends on logp"),
        ("audit {mine}:shouts", ":shouts raised RuntimeError: first line second line (called with logp [15, 3], old_"),
        ("audit grpo --html {dir}/none/audit.html", "no folder"),
        ("audit grpo --json {dir}", "it is a folder"),
        ("audit --json grpo", "--json=-"),
        ("audit --json my.py:loss", "--json=-"),
        ("audit grpo --verl-python x", "--peers"),
        ("audit --divergence rkl", "name the LOSS"),
        ("audit grpo --divergence kl", "unknown value 'kl'. Did you mean 'rkl'?"),
        ("audit grpo --seeds 0", "at least 1"),
        ("audit grpo --seeds many", "invalid"),
        ("audit grpo --beta -1", "positive"),
        ("audit grpo --no-such-flag", "--no-such-flag"),
        ("algorithms dappo", "Did you mean 'dapo'"),
        ("algorithms --jsn", "unknown option --jsn; did you mean --json?"),
        ("--vresion", "unknown option --vresion; did you mean --version?"),
        ("aduit", "unknown command 'aduit'. Did you mean 'audit'? Known: "),
        ("trian", "Did you mean 'train'?"),
        ("evaluate x", "Did you mean 'eval'?"),
        ("resume", "Did you mean rpg train --resume?"),
        ("eval builtin -k 2", "rpg eval: unknown option -k; did you mean --k? (rpg eval --help)"),
        ("train steps=5", "rpg train: unrecognized argument steps=5; did you mean --steps 5? (rpg train --help)"),
        ("train --trainer.n_gpus_per_node 2", "torchrun starts a process a GPU (docs/multi-gpu.md)"),
        ("export vrel x.yaml", "rpg export: unknown command 'vrel'. Did you mean 'verl'?"),
        ("xyzzy", "unknown command 'xyzzy'. Known: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(losses, tmp_path, argv, says):
    (tmp_path / "syntax.py").write_text("def loss(:\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('while importing')\n")
    code, out, err = inside(*argv.format(mine=losses, dir=tmp_path).split())
    said = [line for line in err.splitlines() if "may print" not in line]
    assert code == 2
    assert out == ""
    assert len(said) == 1, err
    assert said[0].startswith("rpg")
    assert says in said[0]


def test_a_mistake_shows_no_traceback_to_the_shell():
    done = process("audit", "gropo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'grpo'" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written_is_known_before_the_audit(tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = inside("audit", "grpo", "--html", tmp_path / "audit.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "permission denied" in err


def test_a_file_that_fails_to_be_written_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = inside("audit", "ppo", "--seeds", "1", "--svg", tmp_path / "audit.svg")
    assert code == 2
    assert err == f"rpg audit: cannot write {tmp_path}/audit.svg: [Errno 28] No space left on device\n"


def test_a_reader_that_stops_early_is_no_error():
    env = os.environ | {"PYTHONPATH": SOURCE}
    command = f"{sys.executable} -m rpg.cli algorithms --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["[0"], "")


# ---- algorithms, version, help ---------------------------------------------------------------------------------------


def test_algorithms_as_a_table_holds_every_choice_and_fits_a_pipe():
    code, out, _ = inside("algorithms")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    starts = [re.search(rf"^ {re.escape(name)} ", out, re.MULTILINE).start() for name in rpg.algorithms()]
    for name, start, end in zip(rpg.algorithms(), starts, [*starts[1:], len(out)], strict=True):
        a, row = rpg.algorithm(name), out[start:end]
        chosen = (a.loss.divergence, a.loss.estimator, a.loss.level, a.loss.reduction, a.advantage.kind, a.paper)
        for text in (*chosen, f"ref = {a.reference}", type(a.loss.clip).__name__.replace("NoneType", "none")):
            assert text in row, (name, text)
        gate = {f"gate {type(a.loss.gate).__name__}": a.loss.gate, "curvature gate": a.curvature_gate}
        entropy = {"entropy target": a.loss.entropy_target, "entropy bonus": a.loss.entropy_bonus}
        for text, has in ({"through Â": a.loss.through_advantage} | gate | entropy).items():
            assert (text in row) == bool(has), (name, text)
    assert "RPGClip 0.8–1.28, c=10" in out
    assert re.search(r"each token: Box +seq-mean-token-sum\n +0\.67032–1\.4918\n", out)  # gmpo


AROUND = {
    "gpg": "min_signal 0.6",
    "capo": "curvature gate",
    "dapo": "dynamic sampling, overlong penalty",
    "grpo": "nothing",
}


def test_a_page_names_what_is_around_the_loss():
    around = {name: re.search(r"^around it +(.*)$", inside("algorithms", name)[1], re.MULTILINE)[1] for name in AROUND}
    assert around == AROUND


def test_algorithms_as_json_says_what_the_library_says():
    code, out, _ = inside("algorithms", "--json")
    assert code == 0
    found = {d["name"]: d for d in json.loads(out)}
    assert list(found) == rpg.algorithms()
    assert found["dapo"]["clip_bounds"] == pytest.approx([0.8, 1.28])
    assert found["cispo"]["clip_bounds"] == [0.0, 5.0]
    assert found["sapo"]["clip_bounds"] == [0.0, None]
    assert found["grpo"]["beta"] == 0.04
    assert found["rpg-reinforce-urkl"]["kl_in_clip"] is True
    assert found["rpg-ufkl"]["kl_in_clip"] is False
    assert found["ppo"]["kl_in_clip"] is None


@pytest.mark.parametrize("name", ["cispo", "rpg-reinforce-urkl", "reinforce++", "reinforce", "gpg"])
def test_one_algorithm_shows_formula_paper_and_options_that_work(name):
    _, out, _ = inside("algorithms", name)
    a = rpg.algorithm(name)
    assert " ".join(a.formula.split()) in " ".join(out.split())
    assert a.paper in out
    options = json.loads(inside("algorithms", name, "--json")[1])["options"]
    assert options["mismatch"] is None
    assert all(re.search(rf"^  {key} ", out, re.MULTILINE) for key in options)
    assert rpg.algorithm(name, **options | {"advantage": rpg.Advantage(**options["advantage"])}) == a


def test_the_code_of_every_algorithm_is_printed_as_it_is_written(capsys):
    for name in rpg.algorithms():
        _show_algorithm(rpg.algorithm(name))
        out = capsys.readouterr().out
        for source in sources(name):
            assert source in out, name
            ast.parse(source)


def test_bare_rpg_shows_the_help():
    assert inside() == (0, inside("--help")[1], "")
    assert inside()[1].startswith("usage: rpg")


def test_what_others_call_a_command_leads_to_one_of_ours():
    names = cli.build_parser()._subparsers._group_actions[0].choices
    for ours, others in cli.COMMANDS_ELSEWHERE.items():
        first = ours.split()[0]
        more = {"push": ["x", "org/x"]}.get(first, ["x"] if first in ("export", "sample", "chat", "replay") else [])
        cli.build_parser().parse_args([*ours.split(), *more])
        assert not set(others) & set(names)


def test_version_and_help():
    assert inside("--version") == (0, f"rpg {rpg.__version__}\n", "")
    code, out, _ = inside("audit", "--help")
    assert code == 0
    text = " ".join(out.split())
    for flag in ("--peers", "--json", "--html", "--svg", "--markdown", "--seeds", "--beta", "--divergence", "--strict"):
        assert flag in text
    assert "with --peers: interpreter that has verl" in text
    assert all(scenario.split(",")[0] in text for scenario in SCENARIOS if scenario != "three policies")


@pytest.mark.parametrize(
    ("command", "counts", "not_here"),
    [
        ("eval", ["--task.template", "--rollout.engine", "--device", "--k"], ["--optim.lr", "--steps", "--log.wandb"]),
        ("sample", ["--task.system", "--rollout.top_k", "--temperature"], ["--eval.k", "--output", "--loss.KEY"]),
        ("chat", ["--task.system", "--rollout.min_p"], ["--rollout.prompts", "--checkpoint.every"]),
    ],
)
def test_help_lists_what_counts_there(command, counts, not_here):
    code, text, _ = inside(command, "--help")
    assert code == 0
    assert "%%" not in text
    assert all(re.search(rf"^  {re.escape(flag)} ", text, re.M) for flag in counts)
    assert not [flag for flag in not_here if flag in text]
    flag = not_here[0]
    code, _, err = inside(command, "builtin", flag, "1")
    assert code == 2
    assert f"{flag} has no effect here: leave it out" in err


@pytest.mark.parametrize(
    "command", ["train", "merge", "tasks", "report", "export verl", "audit", "algorithms", "bench"]
)
def test_no_help_shows_a_format(command):
    assert "%%" not in inside(*command.split(), "--help")[1]


def test_settings_with_a_shorter_name_are_still_taken(tmp_path):
    code, _, err = inside("eval", tmp_path, "--eval.k", "0")
    assert code == 2
    assert "eval.k must be at least 1" in err
