"""A checkpoint is whole or not there: damage, full disks and kill -9, all of them real."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rpg.run import checkpoint
from rpg.run.checkpoint import CheckpointError, folders, load, prune, read, save, verify

STATE = {"step": 3, "best": 0.1 + 0.2, "none": None, "tiny": 5e-324, "low": float("-inf"), "rng": [1, [2, 3]], "é": "ü"}


def write_model(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(20_000))


def tensors(step=0):
    return {"optimizer": {"a": torch.arange(6.0) + step, "b/c": torch.ones(2, 3, dtype=torch.bfloat16)}, "rng": {}}


def put(root, *steps):
    return [save(root, step, write_model, tensors(step), STATE | {"step": step}) for step in steps][-1]


def hidden(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def never(message):
    raise AssertionError(message)


# ---- what is saved comes back


def test_round_trip(tmp_path):
    folder = put(tmp_path / "a" / "checkpoints", 3)
    assert folder == tmp_path / "a" / "checkpoints" / "step-000003"
    saved = load(folder.parent, never)
    assert (saved.step, saved.folder, saved.model_folder) == (3, folder, folder / "model")
    assert saved.state == STATE
    assert saved.tensors("rng") == {}
    back = saved.tensors("optimizer")
    assert back.keys() == tensors()["optimizer"].keys()
    assert torch.equal(back["a"], torch.arange(6.0) + 3)
    assert back["b/c"].dtype == torch.bfloat16
    assert verify(folder) is None
    assert hidden(folder.parent) == []
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    trainer = {"manifest.json", "state.json", "optimizer.safetensors", "rng.safetensors"}
    assert names == {"model/config.json", "model/model.safetensors", *(f"trainer/{name}" for name in trainer)}
    with pytest.raises(CheckpointError, match="cannot read the tensors of 'nothing'"):
        saved.tensors("nothing")


def test_tensors_of_every_kind(tmp_path):
    base = torch.randn(4, 6)
    given = {
        "base": base,
        "same": base,
        "view": base[1:3],
        "transposed": base.T,
        "strided": base[:, ::2],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "bytes": torch.get_rng_state(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    save(tmp_path, 1, write_model, {"x": given}, {})
    back = load(tmp_path, never).tensors("x")
    assert back.keys() == given.keys()
    for name, x in given.items():
        assert back[name].dtype == x.dtype
        assert back[name].shape == x.shape
        assert torch.equal(back[name].flatten().view(torch.uint8), x.detach().contiguous().flatten().view(torch.uint8))


def test_neighbours_in_one_storage_are_not_copied(tmp_path, monkeypatch):
    """Masters and moments in a slab of pinned memory: a second copy would be gigabytes. Overlaps have to be copied."""
    slab = torch.arange(12.0)
    apart = {"second": slab[8:].view(2, 2), "first": slab[:8], "none": slab[8:8]}
    overlapping = {"end": slab[4:], "all": slab, "one": slab[5], "begin": slab[:4]}
    copied = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: copied.append(x.shape) or x + 0)
    save(tmp_path, 1, write_model, {"x": apart}, {})
    assert not copied
    save(tmp_path, 2, write_model, {"x": overlapping}, {})
    assert copied
    for step, given in ((1, apart), (2, overlapping)):
        back = read(tmp_path / f"step-{step:06d}").tensors("x")
        assert back.keys() == given.keys()
        assert all(torch.equal(back[name], x) for name, x in given.items())


def test_the_newest_is_loaded(tmp_path):
    put(tmp_path, 9, 10, 1_000_000, 2)
    assert list(folders(tmp_path)) == [2, 9, 10, 1_000_000]
    assert load(tmp_path, never).step == 1_000_000


def test_nothing_to_load(tmp_path):
    assert load(tmp_path / "none", never) is None
    assert load(tmp_path, never) is None
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").touch()
    assert load(tmp_path, never) is None


def test_one_that_is_there_is_replaced(tmp_path):
    put(tmp_path, 1)
    (tmp_path / "step-000001" / "model" / "stray").touch()
    save(tmp_path, 1, write_model, tensors(7), {"again": True})
    saved = load(tmp_path, never)
    assert saved.state == {"again": True}
    assert saved.tensors("optimizer")["a"][0] == 7
    assert not (saved.model_folder / "stray").exists()
    assert hidden(tmp_path) == []


def test_a_state_that_is_not_json_is_the_callers_mistake(tmp_path):
    put(tmp_path, 1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 2, write_model, {}, {"x": object()})
    assert list(folders(tmp_path)) == [1]


# ---- damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


FILES = ["model/config.json", "model/model.safetensors", "trainer/state.json", "trainer/optimizer.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip, "is not what was saved (SHA-256 differs)"), (truncate, "bytes instead of"), (Path.unlink, "is missing")],
)
def test_damage_is_named_and_the_one_before_is_used(tmp_path, name, damage, message):
    folder = put(tmp_path, 1, 2)
    damage(folder / name)
    warnings = []
    assert load(tmp_path, warnings.append).step == 1
    (warning,) = warnings
    assert warning.startswith(f"{folder} is damaged: {name} ")
    assert message in warning
    assert "\n" not in warning
    with pytest.raises(CheckpointError, match="is damaged"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "trainer/manifest.json is missing"),
        ("", "trainer/manifest.json cannot be understood"),
        ("[]", "trainer/manifest.json cannot be understood"),
        ('{"format": 2, "step": 2, "files": {}}', "trainer/manifest.json cannot be understood"),
        ('{"format": 1, "step": 2, "files": {}}', "trainer/manifest.json does not list trainer/state.json"),
        ('{"format": 1, "step": 2, "files": {"trainer/state.json": 3}}', "trainer/manifest.json cannot be understood"),
        ('{"format": 1, "step": 1, "files": {"trainer/state.json": {}}}', "trainer/manifest.json is of step 1"),
    ],
)
def test_a_manifest_that_does_not_hold(tmp_path, content, message):
    folder = put(tmp_path, 1, 2)
    manifest = folder / "trainer" / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    assert verify(folder) == message
    assert load(tmp_path, lambda _: None).step == 1


def test_every_byte_of_the_manifest_may_be_wrong(tmp_path):
    """Whatever the damage, verify says so or the checkpoint is the one that was saved; it never raises."""
    folder = put(tmp_path, 1)
    manifest = folder / "trainer" / "manifest.json"
    whole = manifest.read_bytes()
    for i in range(0, len(whole), 3):
        manifest.write_bytes(whole[:i] + bytes([whole[i] ^ 0x15]) + whole[i + 1 :])
        wrong = verify(folder)
        assert wrong is None or "\n" not in wrong
        assert wrong is not None or json.loads(manifest.read_bytes()).get("files", {}).keys() >= {"trainer/state.json"}


def test_all_are_damaged(tmp_path):
    put(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-00000{step}" / "model" / "model.safetensors")
    warnings = []
    assert load(tmp_path, warnings.append) is None
    assert ["step-000002" in warnings[0], "step-000001" in warnings[1]] == [True, True]
    with pytest.warns(UserWarning, match="is damaged"):
        load(tmp_path)


# ---- left-overs of a killed process


def test_half_written_folders_are_removed(tmp_path):
    put(tmp_path, 1)
    for clean in (lambda: load(tmp_path, never), lambda: put(tmp_path, 2)):
        for name in (".saving-step-000002", ".removed-step-000001", ".replaced-step-000001"):
            shutil.copytree(tmp_path / "step-000001", tmp_path / name)
        clean()
        assert hidden(tmp_path) == []
    assert list(folders(tmp_path)) == [1, 2]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path):
    put(tmp_path, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / ".replaced-step-000002")
    assert load(tmp_path, never).step == 2
    assert hidden(tmp_path) == []


def test_a_reader_leaves_a_save_under_way_alone(tmp_path):
    put(tmp_path, 1)

    def slow(folder):
        assert load(tmp_path, never).step == 1  # another process would see the same: the lock is held
        assert folder.is_dir()
        write_model(folder)

    save(tmp_path, 2, slow, {}, {})
    assert load(tmp_path, never).step == 2


# ---- failures while writing


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["an error", "an interrupt"])
def test_what_write_model_raises_comes_through(tmp_path, error):
    put(tmp_path, 1)

    def fail(folder):
        write_model(folder)
        raise error

    with pytest.raises(type(error)):
        save(tmp_path, 2, fail, {}, {})
    assert hidden(tmp_path) == []
    assert list(folders(tmp_path)) == [1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "no permission to write"),
        (OSError(122, "Disk quota exceeded"), "the disk quota is used up"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (Exception("No space left on device (os error 28)"), "the disk is full"),  # as tokenizers raise it
    ],
)
def test_reasons(tmp_path, error, reason):
    def fail(folder):
        raise error

    with pytest.raises(CheckpointError) as raised:
        save(tmp_path, 2, fail, {}, {})
    assert str(raised.value) == f"{reason}: cannot write {tmp_path / 'step-000002'}; there is no earlier checkpoint"


def test_a_failed_replacement_keeps_the_old_one(tmp_path, monkeypatch):
    put(tmp_path, 1)
    rename = Path.rename

    def fail(self, target):
        if self.name.startswith(".saving-"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=r"the disk is full: .*the last checkpoint is step 1 in "):
        save(tmp_path, 1, write_model, {}, {"new": True})
    assert load(tmp_path, never).state["step"] == 1
    assert hidden(tmp_path) == []


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*; there is no earlier checkpoint"):
        put(tmp_path / "file" / "checkpoints", 1)


SAVE = """
import json, sys, torch
from pathlib import Path
from rpg.run.checkpoint import CheckpointError, save
root, large = Path(sys.argv[1]), 8_000_000

def attempt(step, model=10, tensors=10, state=10):
    def write_model(folder):
        (folder / "model.bin").write_bytes(b"x" * model)
    try:
        save(root, step, write_model, {"optimizer": {"a": torch.zeros(tensors // 4)}}, {"text": "y" * state})
        return None
    except CheckpointError as error:
        return str(error)

print(json.dumps([attempt(1), attempt(2, model=large), attempt(2, tensors=large), attempt(2, state=large)]))
"""


def fail_for_real(root, reason, preexec=None):
    """Model, tensors and state in turn too large for what there is."""
    command = [sys.executable, "-c", SAVE, str(root)]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=preexec, check=True)
    first, *failures = json.loads(run.stdout)
    last = f"the last checkpoint is step 1 in {root / 'step-000001'}"
    assert first is None
    assert failures == [f"{reason}: cannot write {root / 'step-000002'}; {last}"] * 3
    assert list(folders(root)) == [1]
    assert hidden(root) == []
    assert verify(root / "step-000001") is None


def test_a_file_that_grows_too_large(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    fail_for_real(tmp_path, "a file is larger than the system allows", limit)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk):
    fail_for_real(small_disk / "checkpoints", "the disk is full")
    assert shutil.disk_usage(small_disk).used < 100_000


# ---- kill -9

LOOP = """
import itertools, os, sys, torch
from pathlib import Path
from rpg.run.checkpoint import load, prune, save
root = Path(sys.argv[1])

def loop():
    saved = load(root, lambda text: os._exit(1))
    step = saved.step if saved else 0

    def write_model(folder):
        for i in range(3):
            (folder / f"{i}.bin").write_bytes(bytes([step % 256]) * 100_000)

    for i in itertools.count():
        step += i % 3 != 2  # every third replaces the one before
        save(root, step, write_model, {"optimizer": {"a": torch.full((50_000,), float(step))}}, {"step": step})
        prune(root, 2, best=1)
        os.write(1, f"{step}\\n".encode())

for _ in sys.stdin:  # a fresh process for each line; the imports are paid for once
    child = os.fork()
    if not child:
        try:
            os.write(1, f"{os.getpid()}\\n".encode())
            loop()
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_kill_9_in_the_middle_of_saves(tmp_path):
    """A process that saves and prunes in a loop is killed at 20 random moments."""
    seen, midway, clock = 0, 0, random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for _ in range(20):
            server.stdin.write("go\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            done = [int(server.stdout.readline())]  # one save at least
            time.sleep(clock.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            done += [int(line) for line in iter(server.stdout.readline, "dead\n")]
            midway += bool(hidden(tmp_path))
            saved = load(tmp_path, never)
            assert hidden(tmp_path) == []
            assert saved.step >= done[-1] >= seen
            assert saved.state == {"step": saved.step}
            assert torch.equal(saved.tensors("optimizer")["a"], torch.full((50_000,), float(saved.step)))
            assert (saved.model_folder / "2.bin").read_bytes() == bytes([saved.step % 256]) * 100_000
            assert 1 in folders(tmp_path)
            seen = saved.step
        server.stdin.close()
    assert midway >= 5  # else the kills came at the wrong moments to show anything


# ---- pruning


def test_prune(tmp_path):
    put(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, 2, best=2)
    assert list(folders(tmp_path)) == [2, 4, 5]
    prune(tmp_path, 2, best=5)
    assert list(folders(tmp_path)) == [4, 5]
    prune(tmp_path, 3, best=None)
    assert list(folders(tmp_path)) == [4, 5]
    assert hidden(tmp_path) == []
    assert load(tmp_path, never).step == 5


def test_prune_that_fails_is_one_line(tmp_path, monkeypatch):
    put(tmp_path, 1, 2)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"cannot delete old checkpoints in .*: Permission denied"):
        prune(tmp_path, 1)


# ---- speed


def test_a_small_model_takes_no_time(tmp_path, monkeypatch):
    """A million parameters and AdamW's state, 12 MB: without the disk's own flush, well under a tenth of a second."""
    monkeypatch.setattr(checkpoint, "_sync", lambda path: None)
    group = {f"{i}": torch.randn(100_000) for i in range(10)}
    model = torch.randn(1_000_000).numpy().tobytes()

    def once(step):
        began = time.perf_counter()
        more = {"a": group, "b": {name: x + 1 for name, x in group.items()}}
        save(tmp_path, step, lambda folder: (folder / "model").write_bytes(model) and None, more, {})
        return time.perf_counter() - began

    assert min(once(step) for step in range(5)) < 0.1
