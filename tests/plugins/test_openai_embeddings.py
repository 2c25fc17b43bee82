"""Embeddings of other servers: passed untouched where they fit, else read, in any form and order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.events import Embedding, EmbeddingForm, Event, Request, Started, Usage, Verbatim
from plugins.providers.openai_embeddings import verbatim_embeddings
from tests.plugins.fake_upstream import FakeUpstream, answer, json_answer
from tests.plugins.openai_reading import answer_format
from tests.plugins.provider_use import READ, VERBATIM, collect, fail, open_provider

VECTOR, TEXT = [0.25, -1.5, 3.0], "AACAPgAAwL8AAEBA"
USAGE = {"prompt_tokens": 2, "total_tokens": 2}


def entry(embedding: Any = VECTOR, index: int = 0) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": embedding}


def document(*data: Any, **fields: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(data), "model": "up", "usage": USAGE} | fields


def request(num_inputs: int = 1, encoding_format: Any = "float") -> Request:
    form = EmbeddingForm(encoding_format=encoding_format)
    return Request("req_1", "embeddings", "m", prompts=["hi"] * num_inputs, embedding=form)


def read(found: Any, num_inputs: int = 1, *, asked: Any = "float", verbatim: bool = True) -> Any:
    reader = answer_format(verbatim, stream=False, dialect="embeddings")
    reader._request = request(num_inputs, asked)
    raw = found if isinstance(found, bytes) else msgspec.json.encode(found)
    return reader.read_body(raw)


def vectors(events: list[Event]) -> list[tuple[int, list[float]]]:
    return [(e.index, e.values()) for e in events if isinstance(e, Embedding)]


@pytest.mark.parametrize(("asked", "given"), [("float", VECTOR), ("base64", TEXT)])
def test_the_asked_form_in_order_passes_as_it_is(asked: str, given: Any) -> None:
    raw = msgspec.json.encode(document(entry(given), entry(given, 1), vendor=1))
    started, passed, usage = read(raw, 2, asked=asked)
    assert isinstance(started, Started)
    assert isinstance(passed, Verbatim)
    assert passed.data == raw
    assert usage == Usage(prompt_tokens=2)


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        (document(entry(TEXT)), "float"),
        (document(entry(VECTOR)), "base64"),
        (document({"embedding": VECTOR}), "float"),
        (document(entry(), usage=None), "float"),
        (document(entry(), model=None), "float"),
        (document(entry(), error=None), "float"),
        (document(entry(), object="embeddings"), "float"),
        (document(entry([0.25, -1.5, 3])), "base64"),
    ],
    ids=["base64", "floats", "no index", "no usage", "no model", "error null", "kind", "integer"],
)
def test_what_does_not_fit_is_read_into_the_same_vector(found: Any, asked: str) -> None:
    assert verbatim_embeddings(msgspec.json.encode(found), request(1, asked)) is None
    assert vectors(read(found, asked=asked)) == [(0, VECTOR)]


def test_a_changed_request_is_never_answered_verbatim() -> None:
    assert vectors(read(document(entry()), verbatim=False)) == [(0, VECTOR)]


def test_vectors_out_of_order_are_put_in_order_by_their_index() -> None:
    found = document(entry([1.0], 1), entry([0.0], 0))
    assert vectors(read(found, 2)) == [(0, [0.0]), (1, [1.0])]


def test_the_answers_model_is_kept_and_a_missing_one_is_that_which_was_asked() -> None:
    assert read(document(entry(TEXT)))[0].model == "up"
    assert read(document(entry(TEXT), model=None))[0].model == "up-model"


@pytest.mark.parametrize(
    "found",
    [
        document(),
        document(entry(), entry()),
        document(entry(), entry(index=2)),
        document(entry(), entry(index=1), entry(index=2)),
        document(entry(), entry(index=-1)),
        document(entry(), {**entry(), "index": "1"}),
        document(entry([]), entry(index=1)),
        document(entry("AAA"), entry(index=1)),
        document(entry("AAAA"), entry(index=1)),
        document(entry([None]), entry(TEXT, index=1)),
        document(entry([1e300]), entry(TEXT, index=1)),
        document(entry({"float": VECTOR}), entry(index=1)),
        b'{"data":[{"embedding":[NaN]},{"embedding":[1]}]}',
        b'{"data":[{"embedding":"AADAfw=="},{"embedding":[1]}]}',
        {"data": None},
        [],
        b"",
        b"<html>",
    ],
    ids=repr,
)
def test_anything_but_one_vector_for_each_input_is_the_upstreams_failure(found: Any) -> None:
    for verbatim in (True, False):
        with pytest.raises(UpstreamUnavailable) as caught:
            read(found, 2, verbatim=verbatim)
        assert "up" in caught.value.message


def test_an_error_in_a_body_with_status_200_is_told() -> None:
    with pytest.raises(UpstreamError) as caught:
        read({"error": {"message": "too long", "code": 400}})
    assert (caught.value.status, caught.value.message) == (400, "too long")


# -- Over HTTP -------------------------------------------------------------------------------------


def with_body(**fields: Any) -> Request:
    asked = request()
    asked.body = msgspec.json.encode({"model": "m", "input": "hi", **fields})
    return asked


@pytest.mark.anyio
async def test_the_clients_body_goes_on_with_another_model_and_without_nulls() -> None:
    script = json_answer(document(entry()))
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        await collect(provider, with_body(dimensions=2, user=None, vendor=1), VERBATIM)
        (received,) = upstream.requests
    assert received.target == "/v1/embeddings"
    assert received.json == {"model": "up-model", "input": "hi", "dimensions": 2, "vendor": 1}


@pytest.mark.anyio
async def test_a_changed_request_keeps_its_form() -> None:
    asked = Request("req_1", "embeddings", "m", prompts=["a", "b"])
    asked.embedding = EmbeddingForm(dimensions=2, encoding_format="base64")
    script = json_answer(document(entry(TEXT), entry(TEXT, 1)))
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        events = await collect(provider, asked, READ)
        (received,) = upstream.requests
    assert vectors(events) == [(0, VECTOR), (1, VECTOR)]
    assert received.json == {
        "model": "up-model",
        "input": ["a", "b"],
        "dimensions": 2,
        "encoding_format": "base64",
    }


NOT_FOUND = '{"detail": "Not Found"}'


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, NOT_FOUND, (400, "unsupported_parameter")),
        (405, "", (400, "unsupported_parameter")),
        (501, '{"error": {"message": "no embeddings"}}', (400, "unsupported_parameter")),
        (404, '{"error": {"message": "no model x", "code": "model_not_found"}}', (404, None)),
        (400, '{"error": {"message": "too long", "param": "input"}}', (400, None)),
        (503, "", (503, None)),
    ],
)
async def test_a_server_without_embeddings_makes_it_the_requests_fault(
    status: int, body: str, expected: tuple[int, str | None]
) -> None:
    script = answer(body, status)
    async with FakeUpstream(script) as upstream, open_provider(upstream.url) as provider:
        _, error = await fail(provider, with_body())
    assert error.status == expected[0]
    assert expected[1] in (None, error.code)
