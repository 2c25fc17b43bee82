"""What a worker does with connections that break off, lie or babble: it drops those, says so in a line, and goes on."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from backend.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Accepted,
    Deltas,
    Hello,
    Rejected,
    encode_frame,
)
from tests.backend.test_worker import ENDLESS, Peer, completion, text_of
from tests.backend.toy_worker import ToyEngine
from tests.backend.worker_process import WorkerProcess

SPEECH = b"".join(
    bytes(encode_frame(message))
    for message in (Hello(), Abort(7), completion(1, "ab", 2), Abort(2), completion(2, "cd", 1))
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """At the end: whatever was sent, there was no traceback, and a line for each connection that was dropped."""
    process = WorkerProcess(tmp_path_factory.mktemp("w"))
    process.wait_ready()
    yield process
    process.process.terminate()
    process.process.wait(30)
    lines = process.stderr().splitlines()
    process.kill()
    assert [line for line in lines if not line.startswith("engine local/0: ")] == []


@pytest.fixture
def talk(worker: WorkerProcess) -> Iterator[socket.socket]:
    """A connection to babble on. Afterwards another one is served as ever, and no row is left."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(worker.socket_path))
        yield connection
    with Peer(worker) as peer:
        peer.send(completion(1, "ok", 2))
        assert text_of(peer.deltas(1)) == "ok"
        assert peer.wait_idle().num_free_blocks == ToyEngine.num_blocks


def frame(value: Any) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return len(payload).to_bytes(4, "big") + payload


def read_to_end(connection: socket.socket) -> None:
    """Returns when the worker has closed its side."""
    while connection.recv(1 << 16):
        pass


def test_frames_may_be_split_at_every_byte(worker: WorkerProcess) -> None:
    said = SPEECH[len(encode_frame(Hello())) :]
    with Peer(worker) as peer:
        for cut in range(1, len(said)):
            peer.socket.sendall(said[:cut])
            peer.socket.sendall(said[cut:])
            deltas = peer.deltas(1, 2)
            assert (text_of(deltas, 1), text_of(deltas, 2)) == ("ab", "c")


def test_frames_may_come_byte_by_byte(worker: WorkerProcess) -> None:
    with Peer(worker) as peer:
        for byte in SPEECH[len(encode_frame(Hello())) :]:
            peer.socket.sendall(bytes([byte]))
        assert text_of(peer.deltas(1, 2), 2) == "c"


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_huge_length_is_refused_before_anything_of_it_comes(
    talk: socket.socket, size: int
) -> None:
    talk.sendall(size.to_bytes(4, "big"))
    read_to_end(talk)


def test_a_length_that_is_never_filled_holds_nobody_up(talk: socket.socket) -> None:
    talk.sendall(MAX_FRAME_BYTES.to_bytes(4, "big") + b"x" * 1000)


@pytest.mark.parametrize("seed", range(60))
def test_a_speech_with_wrong_bytes_harms_nobody_else(talk: socket.socket, seed: int) -> None:
    rng, speech = random.Random(seed), bytearray(SPEECH)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(speech))
        match rng.randrange(4):
            case 0:
                speech[at] = rng.randrange(256)
            case 1:
                del speech[at : at + rng.randint(1, 9)]
            case 2:
                speech[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                speech[at:at] = speech[: rng.randint(1, len(speech))]
    talk.sendall(speech[: rng.randint(1, len(speech))])
    talk.shutdown(socket.SHUT_WR)
    read_to_end(talk)


@pytest.mark.parametrize(
    "value",
    [None, 1, [], {}, {"type": "ready"}, {"type": "hello", "version": "1"}, {"type": "abort"}, "x"],
    ids=str,
)
def test_a_frame_that_is_no_message_closes_its_connection(talk: socket.socket, value: Any) -> None:
    talk.sendall(frame(Hello()) + frame(value))
    read_to_end(talk)


def test_a_request_id_that_is_in_use_ends_the_connection_and_its_rows(talk: socket.socket) -> None:
    talk.sendall(frame(Hello()) + frame(completion(1, "a", ENDLESS)) * 2)
    read_to_end(talk)


def test_aborts_of_anything_are_heard_in_silence(worker: WorkerProcess) -> None:
    with Peer(worker) as peer:
        peer.send(*(Abort(i) for i in (0, -1, 2**63, 5, 5)), completion(5, "ok", 2))
        peer.send(Abort(5), Abort(5), completion(5, "again", 5))
        deltas = peer.deltas(5)
        assert text_of(deltas, 5).endswith("again")


@pytest.fixture(scope="module")
def own_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """It tells at length of prompts that it cannot read: those are its own defects."""
    process = WorkerProcess(tmp_path_factory.mktemp("w"))
    process.wait_ready()
    yield process
    process.kill()


CHAT = {"type": "generate", "request_id": 1, "params": {"max_tokens": 2}}


USER = {"role": "user", "content": "x"}
REFUSED: list[dict[str, Any]] = [
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "x"}]},
    {"messages": []},
    {"messages": [USER], "template_kwargs": {"tools": 1}},
    {"prompts": ["a"], "n": 0},
    {"prompts": ["a"], "n": -1},
    {"prompts": ["a"], "n": 2**40},
    {"prompts": ["a"], "best_of": -5, "n": 0},
    {"prompts": ["a"], "grammar": {"kind": "json_schema", "text": "{"}},
    {"prompts": ["a"], "grammar": {"kind": "choice", "text": "5"}},
    {"prompts": [[2**62]]},
    {"prompts": [[]]},
    {"prompts": ["a"], "params": {"max_tokens": 2**62}},
    {"prompts": ["a"], "params": {"seed": 2**63}},
    {"prompts": ["a"], "params": {"stop": [""]}},
    {},
]
TAKEN: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [USER], "tools": [{}]},
    {"messages": [USER], "tools": [{"function": 1}]},
    {"messages": [USER], "must_call": ["nobody"]},
]


@pytest.mark.parametrize(
    ("fields", "refused"), [*((f, True) for f in REFUSED), *((f, False) for f in TAKEN)], ids=str
)
def test_a_request_that_no_gateway_would_send_is_answered_alone(
    own_worker: WorkerProcess, fields: dict[str, Any], refused: bool
) -> None:
    with Peer(own_worker) as peer:
        peer.send(completion(2, "fine", ENDLESS))
        assert peer.receive_reply() == Accepted(2, 5)
        peer.socket.sendall(frame(CHAT | fields))
        while isinstance(reply := peer.receive_reply(), Deltas):
            pass
        assert reply.request_id == 1
        assert isinstance(reply, Rejected) is refused
        assert isinstance(peer.receive_reply(), Deltas), "the other request does not go on"
        peer.send(Abort(2))
        assert peer.wait_idle().num_free_blocks == ToyEngine.num_blocks
