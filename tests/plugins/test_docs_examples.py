"""The examples of docs/plugins.md do what their first line says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from plugins.errors import InvalidRequest
from plugins.events import Event, Message, Request, Sampling, Text, TextDelta, Usage
from plugins.interfaces import Context, Principal, StreamTransform, UsageRecord
from plugins.manager import Parts, PluginFault, collect_parts

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py: (?:.*)\n((?:.*\n)*?)```", PAGE))
CONTEXT = Context("req_1", Principal("web"), "chat")


def load(folder: Path, name: str, **settings: Any) -> Parts:
    (folder / f"{name}.py").write_text(EXAMPLES[name])
    return collect_parts([f"{name}.py"], {name: settings}, folder)


def chat(text: str) -> Request:
    return Request("req_1", "chat", "m", messages=[Message("user", [Text(text)])])


def text_of(transform: StreamTransform, pieces: list[TextDelta], choice: int = 0) -> str:
    events: list[Event] = []
    for piece in pieces:
        events += transform.feed([piece])
    events += transform.flush()
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.choice == choice)


def build(parts: Parts, request: Request) -> StreamTransform:
    transform = parts.transforms[0][1](request, CONTEXT)
    assert transform is not None
    return transform


def test_every_example_is_tested_here() -> None:
    assert set(EXAMPLES) == {"shout", "no_word", "no_email", "usage_csv"}


@pytest.mark.parametrize("choice", [0, 1])
def test_shout_ends_every_choice_in_an_exclamation_mark(tmp_path: Path, choice: int) -> None:
    request = chat("hi")
    request.sampling = Sampling(n=2)
    shout = build(load(tmp_path, "shout"), request)
    pieces = [TextDelta("a", 0), TextDelta("b", 1)]
    assert text_of(shout, pieces, choice) == "ab"[choice] + "!"


@pytest.mark.parametrize(
    "request_", [chat("a Gizmo"), Request("req_1", "completions", "m", prompts=["a GIZMO"])]
)
def test_no_word_refuses_its_word_in_chats_and_prompts(tmp_path: Path, request_: Request) -> None:
    (_, no_word), *_ = load(tmp_path, "no_word", word="gizmo").filters
    with pytest.raises(InvalidRequest, match="the word gizmo is not allowed here"):
        anyio.run(no_word.apply, request_, CONTEXT)


def test_no_word_passes_what_is_without_it(tmp_path: Path) -> None:
    (_, no_word), *_ = load(tmp_path, "no_word", word="gizmo").filters
    request = chat("a gadget")
    assert anyio.run(no_word.apply, request, CONTEXT) is request


def test_no_word_refuses_the_start_without_its_setting(tmp_path: Path) -> None:
    with pytest.raises(PluginFault, match=r'needs word = "\.\.\."'):
        load(tmp_path, "no_word")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_no_email_finds_addresses_in_pieces_of_any_size(tmp_path: Path, size: int) -> None:
    text = "Ask jo.doe+x@mail.example.org,\nor x@y.org"
    pieces = [TextDelta(text[i : i + size]) for i in range(0, len(text), size)]
    no_email = build(load(tmp_path, "no_email"), chat("hi"))
    assert text_of(no_email, pieces) == "Ask [e-mail],\nor [e-mail]"


def test_no_email_keeps_choices_apart(tmp_path: Path) -> None:
    no_email = build(load(tmp_path, "no_email"), chat("hi"))
    pieces = [TextDelta("x@", 0), TextDelta("one two", 1), TextDelta("y.org", 0)]
    assert text_of(no_email, pieces, 0) == "[e-mail]"


def test_usage_csv_writes_a_line_per_request(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    (_, observer), *_ = load(tmp_path, "usage_csv", path=str(path)).observers
    record = UsageRecord(
        request_id="req_1",
        principal="web",
        dialect="chat",
        model="m",
        target="up/x",
        status=200,
        outcome="ok",
        stream=False,
        klass="standard",
        attempts=1,
        usage=Usage(prompt_tokens=3, completion_tokens=2),
        started_at_s=0.0,
        ttft_ms=1.0,
        duration_ms=2.0,
    )
    anyio.run(observer.on_usage, record)
    observer.file.close()  # type: ignore[attr-defined]
    assert path.read_text() == "req_1,web,m,200,3,2\n"
