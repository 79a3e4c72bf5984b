"""The examples of the guide to rewards, run as they stand there; the judge is asked over HTTP."""

import contextlib
import http.server
import json
import re
import threading
from pathlib import Path

import pytest
import yaml

from rpg.run.config import Config
from rpg.run.settings import leaves
from rpg.tasks.templates import TEMPLATES

GUIDE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
SIZES = {"steps": 2, "rollout.prompts": 4, "rollout.samples": 4, "eval.problems": 4, "eval.k": 2, "log.view": "plain"}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


@contextlib.contextmanager
def judge():
    """Half a point for everything; gives its address and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"score": 0.5}')

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 500

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()


@pytest.mark.parametrize(("name", "part", "mean"), [("brevity", "few_lines", None), ("judge", "score", 0.5)])
def test_functions_of_ones_own(server, name, part, mean, tmp_path):
    code = next(code for code in PYTHON if code.startswith(f"# {name}.py: rpg train "))
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    command = code.splitlines()[0].partition(": rpg ")[2].split()
    with judge() as (address, asked):
        done = server.start(*command, *SMALL, cwd=tmp_path, JUDGE_URL=address).wait()
    assert done.code == 0, done.text
    assert "reward function" not in done.text  # none failed
    rows = [json.loads(line) for line in (tmp_path / "runs/latest/metrics.jsonl").read_text().splitlines()]
    assert f"reward/part/{name}.{part}" in rows[-1]
    assert rows[-1]["reward/part/correct"] == rows[-1]["reward/solved"]
    if mean is not None:
        assert rows[-1][f"reward/part/{name}.{part}"] == mean
        assert len(asked) > 16
        assert set(asked[0]) == {"prompt", "response", "answer"}


def test_from_python(server, tmp_path):
    code = PYTHON[-1]
    done = server.start(code=code, cwd=tmp_path).wait()
    assert done.code == 0, done.text
    assert done.out.strip() == code.strip().rpartition("# ")[2]


def test_names_and_settings_are_those_of_the_code():
    table = GUIDE.partition("| template | asks for |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(TEMPLATES)
    known = [*leaves(Config), "task.rewards"]
    for name in re.findall(r"`(?:--)?((?:task|rollout)\.\w+)", GUIDE):
        assert name in known, name
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)
    assert yaml.safe_load(text)["task"]["rewards"] == {"correct": 1.0, "format": 0.2}
