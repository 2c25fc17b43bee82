from __future__ import annotations

import msgspec
import pytest

from backend import protocol
from backend.engine.params import RequestClass, SamplingParams
from backend.protocol import (
    Abort,
    Accepted,
    Delta,
    Deltas,
    FrameReader,
    Generate,
    Hello,
    Logprob,
    ProtocolError,
    Ready,
    Rejected,
    Stats,
    TopLogprob,
    decode_to_gateway,
    decode_to_worker,
    encode_frame,
)

TO_WORKER = [
    Hello(),
    Abort(7),
    Generate(
        1,
        SamplingParams(max_tokens=3, stop=("a", "b"), logit_bias={5: -1.5}, logprobs=2),
        messages=[{"role": "user", "content": "snow \u2603"}],
        tools=[{"type": "function"}],
        template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        n=2,
        klass=RequestClass.BATCH,
        cache_salt=b"\x00\xff",
    ),
    Generate(2, SamplingParams(), prompts=["text", [1, 2, 3]], echo=True),
]
TO_GATEWAY = [
    Ready("m", "f", 2048, 50_000, 100),
    Accepted(1, 12),
    Rejected(1, "no", "prompt", "context_length_exceeded"),
    Deltas(
        [
            Delta(
                1,
                0,
                "hi",
                1,
                0,
                [Logprob("\ufffd", b"\xe2", -0.5, [TopLogprob("a", b"a", -1.0)], 4)],
            ),
            Delta(1, 1, "", 4, 2, [], "stop", "END"),
            Delta(2, 0, "", 4, 2, [], "error", None, "why"),
        ]
    ),
    Stats(1, 2, 3, 4, 5, 6, 7, 8),
    Stats(1, 2, 3, 4, 5, 6, 7, 8, num_evictions=9, running_by_class=(0, 1, 0, 0)),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_a_message_to_the_worker_arrives_as_it_was_sent(message: msgspec.Struct) -> None:
    (payload,) = FrameReader().feed(bytes(encode_frame(message)))
    assert decode_to_worker(payload) == message


@pytest.mark.parametrize("message", TO_GATEWAY, ids=lambda m: type(m).__name__)
def test_a_message_to_the_gateway_arrives_as_it_was_sent(message: msgspec.Struct) -> None:
    (payload,) = FrameReader().feed(bytes(encode_frame(message)))
    assert decode_to_gateway(payload) == message


def test_frames_are_whole_wherever_the_bytes_are_split() -> None:
    data = b"".join(encode_frame(message) for message in TO_GATEWAY)
    for cut in range(len(data) + 1):
        reader = FrameReader()
        payloads = reader.feed(data[:cut]) + reader.feed(data[cut:])
        assert [decode_to_gateway(payload) for payload in payloads] == TO_GATEWAY


def test_frames_are_whole_when_bytes_come_one_by_one() -> None:
    data = b"".join(encode_frame(message) for message in TO_WORKER)
    reader = FrameReader()
    payloads = [payload for byte in data for payload in reader.feed(bytes([byte]))]
    assert [decode_to_worker(payload) for payload in payloads] == TO_WORKER


def test_an_empty_frame_is_a_payload_of_no_bytes() -> None:
    assert FrameReader().feed(b"\0\0\0\0\0\0\0\0") == [b"", b""]


def test_an_oversize_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError, match="a frame of 101 bytes; the limit is 100"):
        FrameReader(max_frame_bytes=100).feed((101).to_bytes(4, "big"))


def test_a_frame_of_just_the_limit_passes() -> None:
    assert FrameReader(max_frame_bytes=3).feed(b"\0\0\0\3abc") == [b"abc"]


def test_an_oversize_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="the limit is 10"):
        encode_frame(Rejected(1, "a message that is far too long"))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"junk", msgspec.msgpack.encode({"type": "nobody"})],
    ids=["empty", "invalid", "scalar", "unknown tag"],
)
def test_bytes_that_are_no_message_are_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        decode_to_worker(payload)


def test_a_message_for_the_other_side_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_to_worker(msgspec.msgpack.encode(Accepted(1, 2)))


def test_a_message_with_a_field_of_another_type_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="request_id"):
        decode_to_worker(msgspec.msgpack.encode({"type": "abort", "request_id": "7"}))
