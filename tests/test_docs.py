"""The docs against the code: links, commands, settings and names are real, and the examples run as they stand there."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import guides
import tiny
from guides import ROOT, SMALL


@pytest.mark.parametrize("page", guides.pages(), ids=lambda page: page.name)
def test_what_a_page_says_is_so(page):
    wrong = guides.wrong(page, page.read_text(encoding="utf-8"))
    assert not wrong, "\n".join(["", *wrong])


def test_every_target_is_in_the_help_of_make():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"^([a-z-]+):.*##", text, re.M)) == guides.make_targets()
    assert set(re.search(r"^\.PHONY:(.*)", text, re.M)[1].split()) == guides.make_targets()


def test_every_preset_has_its_source():
    text = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    named = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(named) == sorted(set(named))
    assert guides.algorithms() <= set(named)


def sh(line: str) -> str:
    return f"```sh\n{line}\n```\n"


SOUND = f"""\
# A page, with `code` & [a link](README.md)

[up](#a-page-with-code--a-link), [twice](#again-1), [there](CONTRIBUTING.md#contributing),
<img src="docs/audit.svg">, [web](https://x.org/y#z)
```sh
$ make train SEED=1          # a comment
rpg train --config recipes/builtin/grpo.yaml --steps 100 --loss.beta 0.1 --optim.betas 0.9,0.99
rpg train --config my.yaml --task.reward mine.py:score --dry-run h200
OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 -m rpg train \\
   --output runs/x
rpg audit grpo mine.py:loss
python benchmarks/loss_overhead.py --device cuda
pip install -e '.[audit,peft]'
```
{sh("rpg export verl recipe.yaml … --gpus 8")}
```
printed
rpg 0.1.0 says
make it so
```
`rpg train --loss.beta`, `rpg export trl|verl`, `rollout.samples`, `--dry-run`, `rpg is loaded`,
`rpg.clip.KL3(…)`, `loss/clip.py`
```python
import rpg
from rpg import clip
from rpg.kernels import linear_logp
rpg.algorithm("grpo")
```
```yaml
task: {{name: gsm8k}}
```
## Again
## Again
"""


def test_a_sound_page_passes():
    assert guides.wrong(ROOT / "README.md", SOUND) == []


WRONG = [
    ("[a](docs/gone.md)", "link to docs/gone.md: no such file"),
    ("![a](docs/gone.png)", "link to docs/gone.png: no such file"),
    ('<img src="gone.svg">', "link to gone.svg: no such file"),
    ("[a](../../etc)", "link to ../../etc: no such file"),
    ("# Here\n[a](#there)", "link to #there: no such heading"),
    ("[a](docs/audit.md#nowhere)", "link to docs/audit.md#nowhere: no such heading"),
    ("[a](Makefile#L99999)", "link to Makefile#L99999: no such heading"),
    (sh("make trian"), "no target trian in the Makefile"),
    ("`make trian`", "no target trian in the Makefile"),
    (sh("rpg trian"), "Did you mean 'train'?"),
    ("`rpg trian`", "no command trian"),
    ("`rpg export tlr --gpus 8`", "no command tlr"),
    (sh("rpg train --step 3"), "unknown option --step; did you mean --steps?"),
    (sh("rpg train --rollout.sample 3"), "unknown option --rollout.sample; did you mean --rollout.samples?"),
    (sh("rpg train --steps three"), "must be a whole number"),
    (sh("rpg train --steps -1"), "steps"),
    (sh("rpg train --algorithm gpro"), "gpro"),
    (sh("rpg train --loss.bta 1"), "bta"),
    (sh("torchrun -m rpg train --sed 1"), "unknown option --sed"),
    (sh("rpg train … --sed 1"), "rpg train knows no --sed"),
    ("```\n$ rpg train --sed 1\nprinted\n```", "unknown option --sed"),
    ("```\nrpg train --sed 1\n```", "unknown option --sed"),
    ("```python\n# mine.py: rpg train --sed 1\n```", "unknown option --sed"),
    (sh("rpg train --steps 1 \\\n  --sed 1"), "unknown option --sed"),
    (sh("rpg train --config recipes/gone.yaml"), "there is no recipes/gone.yaml"),
    (sh("rpg train --config builtin/dpao"), "did you mean builtin/dapo?"),
    (sh("rpg audit gpro"), "no algorithm gpro"),
    (sh("rpg audit --drft 1"), "unknown option --drft; did you mean --drift?"),
    ("`rpg audit --drft`", "rpg audit knows no --drft"),
    (sh("python benchmarks/gone.py"), "there is no benchmarks/gone.py"),
    (sh("python benchmarks/loss_overhead.py --devise cpu"), "loss_overhead.py knows no --devise"),
    (sh("pip install -e '.[audits]'"), "no extra audits in pyproject.toml"),
    ("`rollout.sample`", "no setting rollout.sample"),
    ("`--rollout.sample 3`", "no setting --rollout.sample"),
    ("`--dry-runs`", "nothing has a flag --dry-runs"),
    ("```yaml\nrollout: {sample: 3}\n```", "unknown key 'rollout.sample'"),
    ("```python\nfrom rpg import\n```", "does not compile"),
    ("```python\nfrom rpg import PolicyLos\n```", "there is no rpg.PolicyLos"),
    ("```python\nfrom rpg.tasks.gone import x\n```", "there is no rpg.tasks.gone"),
    ("```python\nfrom rpg.tasks.verify import verdict\n```", "there is no rpg.tasks.verify"),
    ("```python\nimport rpg.gone\n```", "there is no rpg.gone"),
    ("```python\nrpg.clip.Gone()\n```", "there is no rpg.clip.Gone"),
    ("```diff\n-from x import\n+from rpg.kernels import gone\n```", "there is no rpg.kernels.gone"),
    ("`rpg.kernels.gone`", "there is no rpg.kernels.gone"),
    ("`tests/gone.py`", "there is no tests/gone.py"),
    ("`gone/loop.py`", "there is no gone/loop.py"),
    ("```\nsrc/rpg/gone.py    a file\n```", "there is no src/rpg/gone.py"),
]


def test_what_is_not_so_is_seen():
    seen = [(text, complaint, guides.wrong(ROOT / "README.md", text)) for text, complaint in WRONG]
    missed = [row for row in seen if not any(row[1] in line for line in row[2])]
    assert not missed, "\n".join(map(repr, missed))


# ---- examples, run ---------------------------------------------------------------------------------------------------


def guide(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


FILES = [  # Python blocks that say how they are used: "# shout.py: rpg train --task.reward shout.py:score"
    (*used.groups(), code)
    for page in guides.pages()
    for code in guides.blocks(page.read_text(encoding="utf-8"), "python")
    if (used := re.match(r"# (\w+\.py): rpg (train .*)", code))
]


@contextlib.contextmanager
def judge() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that gives half a point for everything; its address, and what it was asked."""
    asked: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"score": 0.5}')

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 500

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()


def test_there_are_examples():
    assert {name for name, _, _ in FILES} >= {"shout.py", "double.py", "brevity.py", "judge.py"}


@pytest.mark.parametrize(("name", "command", "code"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_of_ones_own(server, name, command, code, tmp_path):
    (tmp_path / name).write_text(code, encoding="utf-8")
    with judge() as (address, asked):
        done = server.start(*command.split(), *SMALL, cwd=tmp_path, JUDGE_URL=address).wait()
    assert done.code == 0, done.text
    assert "2 steps" in done.out
    assert "reward function" not in done.text  # none failed
    last = json.loads((tmp_path / "runs/latest/metrics.jsonl").read_text().splitlines()[-1])
    if name == "brevity.py":
        assert "reward/part/brevity.few_lines" in last
    if name == "judge.py":
        assert last["reward/part/judge.score"] == 0.5
        assert len(asked) > 16
        assert set(asked[0]) == {"prompt", "response", "answer"}
    if "task.rewards.correct" in command:
        assert last["reward/part/correct"] == last["reward/solved"]


def run(server, folder: Path, *argv: str, code: str | None = None) -> str:
    done = server.start(*argv, code=code, cwd=folder).wait()
    assert done.code == 0, done.text
    return done.out


def test_training_and_sampling_from_python(server, tmp_path):
    training, sampling = (code for code in guides.blocks(guide("training.md"), "python") if not code.startswith("# "))
    small = training.replace("steps=30", "steps=0")
    assert small != training
    run(server, tmp_path, code=small)
    assert len(set(run(server, tmp_path, code=sampling).strip().split("\n\n"))) >= 3  # of four, not all the same
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()


def test_sampling_as_the_page_shows_it(server, tmp_path):
    page = guide("sampling.md")
    command, shown = re.search(r"```\n\$ rpg (sample .*?)\n(.*?)```", page, re.S).groups()
    assert run(server, tmp_path, *shlex.split(command)).strip() == shown.strip()
    for code in guides.blocks(page, "python"):
        assert run(server, tmp_path, code=code).count("answer") >= 4


def test_scoring_from_python(server, tmp_path):
    code = guides.blocks(guide("rewards.md"), "python")[-1]
    assert run(server, tmp_path, code=code).strip() == code.strip().rpartition("# ")[2]


def test_models_from_python(server, tmp_path):
    first, whole = guides.blocks(guide("models.md"), "python")
    command = guides.blocks(guide("models.md"), "bash", "sh")[0]
    assert "12+7=" in run(server, tmp_path, code=first)
    assert (tmp_path / "copy" / "model.safetensors").exists()
    run(server, tmp_path, *command.split()[1:], *SMALL)
    run(server, tmp_path, code=whole)
    assert (tmp_path / "whole" / "model.safetensors").exists()
    assert "mean@" in run(server, tmp_path, "eval", "whole", "--k=2", "--eval.problems=2")  # as rpg reads any model


class Ready(Exception):
    """The task and the model are loaded and fit each other."""


def test_every_command_of_the_data_page_finds_what_it_needs(tmp_path, monkeypatch):
    """With a small model for the hub's, and a few rows for its datasets."""
    from rpg.cli import main
    from rpg.tasks import Problem, loading

    def refuse(*_):
        raise Ready

    (block, *_) = guides.blocks(guide("data.md"), "sh")
    lines = [
        words for line in block.splitlines() if (words := shlex.split(line, comments=True))[:2] == ["rpg", "train"]
    ]
    assert len(lines) == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPG_DATA", str(tmp_path))
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "label": str(2 * n)} for n in range(20)]
    for name in ("gsm8k-train", "gsm8k-test", "math-train", "math-500", "dapo-math-17k", "aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([{**row, "answer": None} for row in rows]), tmp_path / "train.parquet")
    (tmp_path / "double.py").write_text(next(code for name, _, code in FILES if name == "double.py"), encoding="utf-8")
    monkeypatch.setattr(loading, "load_hub", lambda *_: ([Problem(r["question"], r["answer"]) for r in rows], [], 0))
    monkeypatch.setattr("rpg.training.loop.make_scorer", refuse)  # what comes next, in processes of its own
    model = tiny.with_bytes(tmp_path / "model")
    for number, words in enumerate(lines):
        named = [str(model) if word == "Qwen/Qwen3-0.6B" else word for word in words[1:]]
        assert (str(model) in named) == ("double.py:make" not in named)
        with pytest.raises(Ready):
            main([*named, f"--output={tmp_path / str(number)}", "--log.view=none"])


def test_the_templates_of_the_guide_are_those_of_the_code():
    from rpg.tasks.templates import TEMPLATES

    table = guide("rewards.md").partition("| template | asks for |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(TEMPLATES)
