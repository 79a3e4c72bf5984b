"""The processes of a run: one, or those that torchrun has started on this machine, a GPU each.

Every rank knows everything (groups, batch, metrics, cursor) and works on its share of it. Work that a rank does by
itself goes through ``fail_together``: what fails on one rank fails on all. What fails elsewhere, between two collective
operations, is noticed by a thread of every other rank, which ends it: nobody waits for a rank that is gone.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..console import complain, reaches

T = TypeVar("T")

FAILED, TOLD = "rpg/failed", "rpg/told"  # keys of the store
PATIENCE = datetime.timedelta(hours=24)  # for a rank that is slower; one that is gone is noticed otherwise
LOST = "another process of the run is gone: killed, perhaps for its memory"
POLL, GRACE = 0.3, 1.0  # seconds between two looks at the store; for a rank to fail by itself
HEARING = 4.0  # for the first rank to tell the user
NO_GPU = "device {!r} is not to be had: torch finds no GPU here; --device cpu runs without"
STOPPED = 130  # the code of a run that was stopped at once


class RankFailed(Exception):
    """Another rank cannot go on; its text is one line."""


class World:
    """This process among those of the run. ``sharded``: weights are spread over the ranks (shards.py)."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        sharded: bool = False,
        store: Any = None,
    ):
        self.rank, self.size, self.device, self.sharded = rank, size, device, sharded
        self._store = store
        self.host: Any = None  # the group for objects; None: the default one
        self._over = threading.Event()
        self.on_failure: Callable[[str, str], None] = lambda text, status: None  # before the watcher ends this process

    @property
    def first(self) -> bool:
        """Whether this is the rank that shows, logs and saves."""
        return self.rank == 0

    # ---- objects, on the host ----------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Everybody's, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def from_rank0(self, value: T) -> T:
        """The first rank's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host)
        return values[0]

    def fail_together(self, work: Callable[[], T]) -> T:
        """Work without collective operations. Where it raises on one rank, it raises on all."""
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        texts = self.gather(None if error is None else one_line(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankFailed(text if rank == 0 else f"rank {rank}: {text}")
        return result  # type: ignore[return-value]

    def on_rank0(self, work: Callable[[], object]) -> None:
        """Done by the first rank, while the others wait."""
        self.fail_together(lambda: work() if self.first else None)

    # ---- tensors, on the device --------------------------------------------------------------------------------------

    def add(self, *tensors: Tensor) -> None:
        """In place: the sums over all ranks."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def cat(self, tensor: Tensor) -> Tensor:
        """Everybody's, one after the other."""
        return tensor if self.size == 1 else torch.cat([x.to(tensor.device) for x in self.gather(tensor.cpu())])

    def norm(self, norm: Tensor) -> Tensor:
        """Of all shards, from that of one's own: the same bits on every rank."""
        if self.size == 1:
            return norm
        return torch.tensor(math.hypot(*self.gather(float(norm))), dtype=norm.dtype, device=norm.device)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def failed(self, message: str, code: int) -> int:
        """Tell the user, once, and end all ranks. Alone: gives the code."""
        if self.size == 1:
            complain(f"rpg train: {message}")
        self.end_all(message, code)
        return code

    def end_all(self, message: str, code: int) -> None:
        """Of several ranks: tell the user, once, and end them all. Alone: nothing."""
        if self.size == 1:
            return
        self._over.set()  # no second message from the watcher
        if self.first:
            complain(f"rpg train: {message}")
        self._publish(message, code)
        _leave(code)

    def _publish(self, message: str, code: int) -> None:
        """To the other ranks. The first tells the user: wait for it, as torchrun ends all once one is gone. Where it is
        the first that is gone, one of the others does."""
        me = str(self.rank)
        try:
            if self.first:
                self._store.set(TOLD, me)
            self._store.compare_set(FAILED, "", json.dumps({"rank": self.rank, "message": message, "code": code}))
            limit = time.monotonic() + HEARING
            while not self._store.check([TOLD]) and time.monotonic() < limit:
                time.sleep(0.05)
            alone = self._store.compare_set(TOLD, "", me).decode() == me
        except RuntimeError:  # torchrun, which holds the store, is gone
            alone = True
        if alone and not self.first:
            complain(f"rpg train: {_told(self.rank, message, code)}")

    def has_lost(self, error: BaseException) -> bool:
        """Whether an operation failed because another rank has gone without a word."""
        return self.size > 1 and isinstance(error, RuntimeError) and "by peer" in str(error)

    def watch(self) -> None:
        """From here on, end when another rank has failed."""
        if self.size > 1:
            threading.Thread(target=self._watch, args=(self._store.clone(),), daemon=True).start()

    def _watch(self, store: Any) -> None:
        while not self._over.wait(POLL):
            try:
                if not store.check([FAILED]):
                    continue
                about = json.loads(store.get(FAILED))
            except RuntimeError:  # the store is gone, and torchrun with it
                return
            if self._over.wait(GRACE):
                return
            if self.first:
                text = _told(**about)
                self.on_failure(text, "stopped" if about["code"] == STOPPED else "failed")
                complain(f"rpg train: {text}")
                store.set(TOLD, "0")
            _leave(about["code"])

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._over.set()
        if self._store is None:
            return
        if error is None:
            dist.destroy_process_group()
        elif self.size > 1:
            at_once = isinstance(error, KeyboardInterrupt)
            if not at_once:
                sys.excepthook(type(error), error, error.__traceback__)
            message = str(error) or "stopped at once" if at_once else one_line(error)
            code = STOPPED if at_once else 1
            self._publish(message, code)
            _leave(code)


def _told(rank: int, message: str, code: int) -> str:
    """What happened to a rank, to the user; which one was stopped is of no interest."""
    return message if rank == 0 or message == LOST or code == STOPPED else f"rank {rank}: {message}"


def _leave(code: int) -> int:
    """At once: threads of collective operations may never end. (It does not return.)"""
    for stream in (sys.stdout, sys.stderr):
        reaches(stream, stream.flush)
    os._exit(code)


ALONE = World()


# ---- torchrun --------------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The world that torchrun has made; without it, or with one process, alone. RPG_FSDP=1 shards even then."""
    if not launched() or (os.environ["WORLD_SIZE"] == "1" and os.environ.get("RPG_FSDP") != "1"):
        yield ALONE
        return
    here, size, local = (int(os.environ[name]) for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if size != local:
        raise ValueError(f"rpg train runs on one machine, not on {size // local}: docs/engines.md says what does")
    _check_torch()
    chosen = own_device(device, here, local)
    with join(chosen, "nccl" if chosen.type == "cuda" else "gloo") as world:
        yield world


def _check_torch() -> None:
    from torch.distributed import fsdp

    needed = ("FSDPModule", "set_force_sum_reduction_for_comms"), ("TCPStore", "clone")
    if not all(hasattr(getattr(fsdp, kind, getattr(dist, kind, None)), method) for kind, method in needed):
        raise ValueError(f"several processes need a later torch than {torch.__version__}: 2.13 is what was tested")


def own_device(name: str, here: int, local: int) -> torch.device:
    """A GPU for each process, in order."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    asked = named_device(name)
    if asked.type not in ("cuda", "cpu"):
        raise ValueError(f"device={name} with several processes: cuda or cpu")
    if asked.index is not None:
        raise ValueError(f"device={name} with several processes: give {asked.type}, or leave it out")
    if asked.type == "cpu":
        return asked
    there = torch.cuda.device_count()
    if not there:
        raise ValueError(NO_GPU.format(name))
    if there < local:
        raise ValueError(f"{local} processes and {there} GPUs: torchrun --nproc-per-node {there}")
    return torch.device("cuda", here)


def named_device(name: str) -> torch.device:
    """By torch's name; gpu is what many call cuda."""
    try:
        return torch.device(re.sub(r"^gpu\b", "cuda", name))
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not to be had: {str(error).splitlines()[0]}") from error


def join(device: torch.device, backend: str) -> World:
    """Meet the others where the environment says."""
    from torch.distributed.rendezvous import rendezvous  # which some builds of torch do not have

    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    world = World(rank, size, device, sharded=True, store=store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        world.host = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=PATIENCE)
    except RuntimeError as error:
        if not world.has_lost(error):
            raise
        world.failed(LOST, 1)
    world.watch()
    return world


# ---- shares ----------------------------------------------------------------------------------------------------------


def deal(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Which prompts each rank samples, by number. A prompt that comes again goes where it went first: the engine tells
    its samples apart by counting them."""
    hands: list[list[int]] = [[] for _ in range(size)]
    seen: dict[tuple[int, ...], int] = {}
    for i, prompt in enumerate(prompts):
        hands[seen.setdefault(tuple(prompt), len(seen)) % size].append(i)
    return hands


def one_line(error: BaseException) -> str:
    """Of what users can mend, the text alone; else with the error's name."""
    text = " ".join(str(error).split())
    named = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("rpg.")
    return text if named and text else f"{type(error).__name__}: {text}"
