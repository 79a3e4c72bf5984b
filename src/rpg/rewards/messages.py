"""What a Scorer and its worker processes say to each other, and how it is packed."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections import deque
from enum import IntEnum
from typing import Any

Item = tuple[str, str, str]  # response, answer, prompt
Outcome = tuple[int, float, str]  # its Kind, the reward, a message
Message = tuple[int, int, Item]  # number of the call, of the function, what to call it with

NO_CALL = 2**32 - 1  # number in replies that are about no call
LENGTH = struct.Struct("<I")  # of the pickle that follows
REPLY = struct.Struct("<IBdH")  # number, kind, value, length of the message that follows
MESSAGE_BYTES = 2000
RUNNING = struct.Struct("<QI")  # steps begun, number of the call whose step it is
MOST_ASYNC = 64  # calls of async functions in one worker at the same time


class Kind(IntEnum):
    """What a reply says."""

    OK = 0
    RAISED = 1
    NOT_FINITE = 2
    TIMED_OUT = 3
    OUT_OF_MEMORY = 4  # the worker ends: the next call must not suffer from it
    READY = 5
    CANNOT_LOAD = 6  # a reward function cannot be had
    DIED = 7
    LEAVING = 8  # calls that are over still hold threads: no more may come


def late(timeout: float) -> str:
    return f"no answer after {timeout:g} s"


def only_in(owner: int) -> None:
    """A fork of the worker that comes back from the user's code ends here: the worker alone answers."""
    if os.getpid() != owner:
        os._exit(0)


class Channel:
    """The worker's end: calls as they come in, and answers to them."""

    def __init__(self, fd: int) -> None:
        self.fd, self._owner = fd, os.getpid()
        self.whole: deque[Any] = deque()
        self._data = bytearray()

    def next(self) -> Any:
        while not self.whole:
            self.read()
        return self.whole.popleft()

    def read(self) -> None:
        """What there is; waits if there is nothing."""
        only_in(self._owner)
        data = os.read(self.fd, 2**16)
        if not data:
            raise EOFError
        self._data += data
        while len(self._data) >= LENGTH.size and len(self._data) >= (end := self._end()):
            self.whole.append(pickle.loads(self._data[LENGTH.size : end]))
            del self._data[:end]

    def answer(self, number: int, outcome: Outcome) -> None:
        only_in(self._owner)
        kind, value, message = outcome
        text = message.encode("utf-8", "replace")[:MESSAGE_BYTES]
        data = REPLY.pack(number, kind, value, len(text)) + text
        while data:
            data = data[os.write(self.fd, data) :]

    def _end(self) -> int:
        return LENGTH.size + int(LENGTH.unpack_from(self._data)[0])


class Running:
    """Shared by both processes: how many steps have begun here, and of which call the present one is."""

    def __init__(self, fd: int) -> None:
        self._memory, self._steps, self._owner = mmap.mmap(fd, RUNNING.size), 0, os.getpid()

    def begin(self, number: int) -> None:
        self._steps += 1
        RUNNING.pack_into(self._memory, 0, self._steps, number)

    def end(self) -> None:
        only_in(self._owner)
        RUNNING.pack_into(self._memory, 0, self._steps, NO_CALL)

    def read(self) -> tuple[int, int]:
        steps, number = RUNNING.unpack_from(self._memory)
        return steps, number

    def close(self) -> None:
        self._memory.close()
