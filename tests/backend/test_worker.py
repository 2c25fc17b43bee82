from __future__ import annotations

import math
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backend.engine.params import SamplingParams
from backend.protocol import (
    Abort,
    Accepted,
    Delta,
    Deltas,
    FrameReader,
    Generate,
    Hello,
    Ready,
    Rejected,
    Stats,
    decode_to_gateway,
    encode_frame,
)
from tests.backend.toy_worker import MAX_MODEL_LEN, ToyEngine
from tests.backend.worker_process import WorkerProcess

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path_factory.mktemp("w"))
    process.wait_ready()
    yield process
    process.kill()


@pytest.fixture
def own_worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path)
    process.wait_ready()
    yield process
    process.kill()


@pytest.fixture
def peer(worker: WorkerProcess) -> Iterator[Peer]:
    with Peer(worker) as peer:
        yield peer


class Peer:
    """A gateway process, as the worker sees one."""

    def __init__(self, worker: WorkerProcess, hello: msgspec.Struct | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(worker.socket_path))
        self._frames = FrameReader()
        self._messages: list[msgspec.Struct] = []
        self.send(hello or Hello())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, *messages: msgspec.Struct) -> None:
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def receive(self) -> msgspec.Struct:
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages += map(decode_to_gateway, self._frames.feed(data))
        return self._messages.pop(0)

    def receive_reply(self) -> Accepted | Rejected | Deltas:
        while True:
            message = self.receive()
            if isinstance(message, Accepted | Rejected | Deltas):
                return message

    def deltas(self, *request_ids: int) -> list[Delta]:
        """All deltas up to the last end of these requests' first choices."""
        found: list[Delta] = []
        waiting = set(request_ids)
        while waiting:
            reply = self.receive_reply()
            assert not isinstance(reply, Rejected), reply
            found += reply.items if isinstance(reply, Deltas) else []
            waiting -= {d.request_id for d in found if d.finish_reason and d.index == 0}
        return found

    def wait_idle(self) -> Stats:
        while True:
            message = self.receive()
            if isinstance(message, Stats) and message.num_running == 0:
                return message


def text_of(deltas: list[Delta], request_id: int = 1, index: int = 0) -> str:
    chosen = [d for d in deltas if (d.request_id, d.index) == (request_id, index)]
    return "".join(delta.text for delta in chosen)


def completion(request_id: int, prompt: str, max_tokens: int = 5, **params: object) -> Generate:
    return Generate(request_id, SamplingParams(max_tokens=max_tokens, **params), prompts=[prompt])


def test_the_worker_says_what_it_serves(peer: Peer) -> None:
    ready = peer.receive()
    assert ready == Ready(
        "toy", "toy-1", MAX_MODEL_LEN, 257, ToyEngine.num_blocks, tool_notation="hermes"
    )


def test_the_socket_is_its_owners_alone(worker: WorkerProcess) -> None:
    assert stat.S_IMODE(worker.socket_path.stat().st_mode) == 0o600


def test_a_completion_streams_and_ends(peer: Peer) -> None:
    peer.send(completion(1, "abc"))
    assert peer.receive_reply() == Accepted(1, 4)  # the beginning-of-text token counts
    deltas = peer.deltas(1)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("abcab", "length")
    assert [delta.num_output_tokens for delta in deltas] == [1, 2, 3, 4, 5]


def test_a_chat_is_rendered_and_tokenized_without_added_specials(peer: Peer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    peer.send(Generate(1, SamplingParams(max_tokens=8), messages=messages))
    assert peer.receive_reply() == Accepted(1, len("user:hi>"))
    assert text_of(peer.deltas(1)) == "user:hi>"


def test_the_developer_is_the_system_where_the_template_knows_no_developer(peer: Peer) -> None:
    messages = [{"role": "developer", "content": "x"}]
    peer.send(Generate(1, SamplingParams(max_tokens=9), messages=messages))
    assert text_of(peer.deltas(1)) == "system:x>"


def test_a_prefilled_answer_gets_no_generation_prompt(peer: Peer) -> None:
    messages = [{"role": "assistant", "content": "so"}]
    peer.send(
        Generate(1, SamplingParams(max_tokens=12), messages=messages, continue_final_message=True)
    )
    assert text_of(peer.deltas(1)) == "assistant:so"


def test_the_templates_own_refusal_is_a_400_with_its_words(peer: Peer) -> None:
    peer.send(Generate(1, SamplingParams(), messages=[{"role": "tool", "content": "x"}]))
    reply = peer.receive_reply()
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.param) == (400, "messages")
    assert "conversations begin with a user" in reply.message


def test_choices_are_counted_over_prompts(peer: Peer) -> None:
    peer.send(Generate(1, SamplingParams(max_tokens=2), prompts=["ab", [99, 100]], n=2))
    assert peer.receive_reply() == Accepted(1, 3 + 2)
    deltas = peer.deltas(1)
    assert [text_of(deltas, index=i) for i in range(4)] == ["ab", "ab", "cd", "cd"]


def test_one_frame_carries_a_step_of_all_streams(peer: Peer) -> None:
    peer.send(completion(1, "abcdefgh", 50), completion(2, "ABCDEFGH", 50))
    frames: list[list[int]] = []
    while not frames or 2 not in frames[-1]:
        reply = peer.receive_reply()
        if isinstance(reply, Deltas):
            frames.append([delta.request_id for delta in reply.items])
    assert frames[-1] == [1, 2]
    peer.send(Abort(1), Abort(2))


def test_a_stop_string_ends_a_choice_unseen_and_is_named(peer: Peer) -> None:
    peer.send(completion(1, "one two three", 100, stop=("two",)))
    deltas = peer.deltas(1)
    assert text_of(deltas) == "one "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "two")


def test_logprobs_do_not_go_past_a_stop_string(peer: Peer) -> None:
    peer.send(completion(1, "ab STOP", 100, stop=("STOP",), logprobs=1))
    entries = [entry for delta in peer.deltas(1) for entry in delta.logprobs]
    assert [entry.token for entry in entries] == ["a", "b", " "]
    assert [entry.text_offset for entry in entries] == [0, 1, 2]
    assert [top.data for top in entries[0].top] == [b"\0"]


def test_logprobs_of_a_cut_character_carry_its_bytes(peer: Peer) -> None:
    peer.send(completion(1, "a\u2603", 4, logprobs=0))
    entries = [entry for delta in peer.deltas(1) for entry in delta.logprobs]
    assert b"".join(entry.data for entry in entries) == "a\u2603".encode()
    assert [entry.text_offset for entry in entries] == [0, 1, 1, 1]


def test_echo_puts_the_prompt_in_front(peer: Peer) -> None:
    peer.send(Generate(1, SamplingParams(max_tokens=2), prompts=["ab", [99]], echo=True, n=1))
    deltas = peer.deltas(1)
    assert [text_of(deltas, index=i) for i in range(2)] == ["abab", "ccc"]


def test_an_echoed_prompt_comes_with_its_logprobs_and_offsets(peer: Peer) -> None:
    params = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0)
    peer.send(Generate(1, params, prompts=["a\u2603"], echo=True))
    deltas = peer.deltas(1)
    assert text_of(deltas) == "a\u2603a\ufffd"
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token for entry in entries[:2]] == ["<s>", "a"]
    assert math.isnan(entries[0].logprob)
    assert [entry.logprob for entry in entries[1:]] == [-97.0, -226.0, -152.0, -131.0, -0.5, -0.5]
    assert [entry.text_offset for entry in entries] == [0, 0, 1, 1, 1, 2, 3]


def test_echo_alone_generates_nothing(peer: Peer) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    peer.send(Generate(1, params, prompts=["ab"], echo=True))
    (delta,) = peer.deltas(1)
    assert (delta.text, delta.num_output_tokens, delta.finish_reason) == ("ab", 0, "length")
    assert delta.logprobs == []


def test_the_best_candidates_are_shown(peer: Peer) -> None:
    params = SamplingParams(max_tokens=2, seed=2)  # mean logprobs by seed: 2 -> -2.5, 3 -> -0.5
    peer.send(Generate(1, params, prompts=["ab", "cd"], n=1, best_of=2))
    deltas = peer.deltas(1)
    assert [(d.index, d.text, d.num_output_tokens) for d in deltas] == [(0, "ab", 4), (1, "cd", 4)]
    peer.wait_idle()


def test_a_prompt_without_room_is_refused_with_the_numbers(peer: Peer) -> None:
    peer.send(Generate(1, SamplingParams(), prompts=[[5] * MAX_MODEL_LEN]))
    reply = peer.receive_reply()
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.code, reply.param) == (400, "context_length_exceeded", "prompt")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in reply.message
    assert f"your prompt resulted in {MAX_MODEL_LEN} tokens" in reply.message


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenized(peer: Peer) -> None:
    peer.send(completion(1, "x" * (3 * 3 * MAX_MODEL_LEN + 1)))
    reply = peer.receive_reply()
    assert isinstance(reply, Rejected)
    assert reply.code == "context_length_exceeded"
    assert "characters" in reply.message


@pytest.mark.parametrize(
    ("generate", "param"),
    [
        (Generate(1, SamplingParams(temperature=3.0), prompts=["a"]), "temperature"),
        (Generate(1, SamplingParams(logit_bias={9999: 1.0}), prompts=["a"]), "logit_bias"),
        (Generate(1, SamplingParams(), prompts=[[1, 9999]]), "prompt"),
        (Generate(1, SamplingParams(), prompts=[]), "prompt"),
        (Generate(1, SamplingParams(), prompts=["a"] * 9, n=128), "n"),
    ],
    ids=["temperature", "logit_bias", "prompt ids", "no prompt", "too many choices"],
)
def test_a_value_out_of_range_is_refused_by_name(
    peer: Peer, generate: Generate, param: str
) -> None:
    peer.send(generate)
    reply = peer.receive_reply()
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.param) == (400, param)


def test_a_refused_prompt_leaves_none_of_its_neighbours_behind(peer: Peer) -> None:
    peer.send(Generate(1, SamplingParams(max_tokens=ENDLESS), prompts=["fine", []]))
    assert isinstance(peer.receive_reply(), Rejected)
    peer.send(completion(2, "x", 1))
    peer.deltas(2)
    assert peer.wait_idle().num_free_blocks == ToyEngine.num_blocks


def test_an_abort_frees_the_row_at_once(peer: Peer) -> None:
    peer.send(completion(1, "abc", ENDLESS))
    assert isinstance(peer.receive_reply(), Accepted)
    peer.receive_reply()
    peer.send(Abort(1))
    assert peer.wait_idle().num_free_blocks == ToyEngine.num_blocks


def test_an_abort_that_overtakes_a_long_prompt_holds(peer: Peer) -> None:
    peer.send(completion(1, "x" * 500_000, ENDLESS), Abort(1), completion(2, "ok", 2))
    assert {delta.request_id for delta in peer.deltas(2)} == {2}
    peer.wait_idle()


def test_an_abort_of_nothing_is_ignored(peer: Peer) -> None:
    peer.send(Abort(99), completion(1, "ok", 2))
    assert text_of(peer.deltas(1)) == "ok"


def test_a_lost_connection_ends_all_it_asked_for(worker: WorkerProcess, peer: Peer) -> None:
    with Peer(worker) as other:
        other.send(*(completion(i, "abc", ENDLESS) for i in range(1, 4)))
        while not isinstance(other.receive_reply(), Deltas):
            pass
    assert peer.wait_idle().num_free_blocks == ToyEngine.num_blocks


def test_connections_may_use_the_same_request_ids(worker: WorkerProcess, peer: Peer) -> None:
    with Peer(worker) as other:
        peer.send(completion(1, "aaaa"))
        other.send(completion(1, "bbbb"))
        assert (text_of(peer.deltas(1)), text_of(other.deltas(1))) == ("aaaaa", "bbbbb")


def test_a_connection_of_another_version_is_closed(worker: WorkerProcess) -> None:
    with Peer(worker, Hello(version=99)) as peer, pytest.raises(EOFError):
        peer.receive()


def test_a_connection_that_sends_junk_is_closed_and_the_others_go_on(
    worker: WorkerProcess, peer: Peer
) -> None:
    with Peer(worker) as other:
        other.socket.sendall(b"\0\0\0\4junk")
        with pytest.raises(EOFError):
            while True:
                other.receive()
    peer.send(completion(1, "ok", 2))
    assert text_of(peer.deltas(1)) == "ok"


def test_a_request_that_the_model_fails_ends_alone(peer: Peer) -> None:
    peer.send(completion(1, "fail"), completion(2, "fine", 4))
    deltas = peer.deltas(1, 2)
    failed = next(delta for delta in deltas if delta.request_id == 1)
    assert (failed.finish_reason, failed.error) == ("error", "the model failed")
    assert text_of(deltas, 2) == "fine"


def test_the_end_of_standard_input_ends_the_process(own_worker: WorkerProcess) -> None:
    with Peer(own_worker) as peer:
        peer.send(completion(1, "abc", ENDLESS))
        peer.receive_reply()
        assert own_worker.end_stdin() == 0
    assert not own_worker.socket_path.exists()


def test_sigterm_ends_the_process(own_worker: WorkerProcess) -> None:
    own_worker.process.terminate()
    assert own_worker.process.wait(30) == 0


def test_a_worker_without_supervisor_ends_before_it_serves(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path, stdin=b"\0\0")
    assert worker.end_stdin() == 1
    assert "before the settings were complete" in worker.stderr()
    worker.kill()


def test_a_corrupt_engine_ends_the_process(own_worker: WorkerProcess) -> None:
    with Peer(own_worker) as peer:
        peer.send(completion(1, "explode"))
        assert own_worker.process.wait(30) == 1
    assert "the engine is corrupt" in own_worker.stderr()


def test_a_model_that_does_not_load_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path, model_path="damaged")
    assert worker.process.wait(30) == 2
    assert worker.stderr() == "engine local/0: damaged: not a model\n"
    worker.kill()


def test_a_socket_file_left_by_a_dead_worker_is_replaced(own_worker: WorkerProcess) -> None:
    own_worker.process.kill()
    own_worker.process.wait()
    assert own_worker.socket_path.exists()
    again = WorkerProcess(own_worker.socket_path.parent)
    again.wait_ready()
    with Peer(again) as peer:
        assert isinstance(peer.receive(), Ready)
    again.kill()
