"""What GET /metrics shows, and what a log line looks like."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.store import Store
from gateway.accounting import Accounting, RequestMeter
from gateway.config_schema import TelemetryConfig
from gateway.logs import configure_logging
from gateway.telemetry import Telemetry
from plugins.events import Request, Usage
from plugins.interfaces import Principal, UsageRecord

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class FakeProvider:
    def __init__(self, name: str, stats: dict[str, float] | None) -> None:
        self.name = name
        self._stats = stats

    def ready(self) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        if self._stats is None:
            raise RuntimeError("no stats today")
        return self._stats


def row(**changes: object) -> UsageRecord:
    fields: dict[str, object] = {
        "request_id": "req_1",
        "principal": "web",
        "dialect": "chat",
        "model": "demo",
        "target": "local/demo",
        "status": 200,
        "outcome": "ok",
        "stream": False,
        "klass": "standard",
        "attempts": 1,
        "usage": Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, reasoning_tokens=2),
        "started_at_s": 0.0,
        "ttft_ms": 30.0,
        "duration_ms": 250.0,
    }
    return UsageRecord(**(fields | changes))


def samples(telemetry: Telemetry) -> dict[str, float]:
    lines = telemetry.render()[0].decode().splitlines()
    parts = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in parts}


def observed(*providers: FakeProvider) -> tuple[Telemetry, Accounting]:
    telemetry = Telemetry(["demo"])
    store = Store("unix:///nowhere", 100)
    accounting = Accounting(store, [], telemetry)
    only = {provider.name: provider for provider in providers}
    telemetry.observe(only, store, accounting, lambda: ["up/m"])
    telemetry.refuse("chat", 401)
    return telemetry, accounting


def test_requests_are_counted_by_model_dialect_outcome_and_status() -> None:
    telemetry = Telemetry(["demo"])
    for record in (row(), row(), row(outcome="error", status=502)):
        telemetry.record(record)
    labels = 'dialect="chat",model="demo",outcome='
    got = samples(telemetry)
    assert got[f'tidegate_requests_total{{{labels}"ok",status="200"}}'] == 2
    assert got[f'tidegate_requests_total{{{labels}"error",status="502"}}'] == 1


def test_names_that_only_a_client_knows_share_one_label() -> None:
    telemetry = Telemetry(["demo"])
    for number in range(100):
        telemetry.record(row(model=f"invented-{number}", status=404, outcome="rejected"))
    lines = [name for name in samples(telemetry) if name.startswith("tidegate_requests_total")]
    assert lines == [
        'tidegate_requests_total{dialect="chat",model="other",outcome="rejected",status="404"}'
    ]


def test_a_model_added_by_a_reload_has_its_own_label() -> None:
    telemetry = Telemetry(["demo"])
    telemetry.set_models(["demo", "new"])
    telemetry.record(row(model="new"))
    assert 'tidegate_tokens_total{kind="prompt",model="new"}' in samples(telemetry)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("prompt", 20), ("completion", 10), ("cached", 8), ("reasoning", 4)]
)
def test_tokens_are_counted_by_kind_over_all_outcomes(kind: str, tokens: int) -> None:
    telemetry = Telemetry(["demo"])
    telemetry.record(row())
    telemetry.record(row(outcome="cancelled", status=499))
    assert samples(telemetry)[f'tidegate_tokens_total{{kind="{kind}",model="demo"}}'] == tokens


@pytest.mark.parametrize(
    ("metric", "below", "at"),
    [
        ("tidegate_request_duration_seconds", "0.1", "0.25"),
        ("tidegate_ttft_seconds", "0.025", "0.05"),
    ],
)
def test_times_fall_into_buckets_whose_bound_belongs_to_them(
    metric: str, below: str, at: str
) -> None:
    telemetry = Telemetry(["demo"])
    telemetry.record(row(ttft_ms=50.0))
    got = samples(telemetry)
    others = 'model="demo",outcome="ok"'
    assert got[f'{metric}_bucket{{dialect="chat",le="{below}",{others}}}'] == 0
    assert got[f'{metric}_bucket{{dialect="chat",le="{at}",{others}}}'] == 1
    assert got[f'{metric}_bucket{{dialect="chat",le="+Inf",{others}}}'] == 1
    assert got[f'{metric}_count{{dialect="chat",{others}}}'] == 1


def test_a_duration_sums_up_over_statuses_of_one_outcome() -> None:
    telemetry = Telemetry(["demo"])
    telemetry.record(row(outcome="error", status=502, duration_ms=1000.0))
    telemetry.record(row(outcome="error", status=504, duration_ms=2000.0))
    labels = 'dialect="chat",model="demo",outcome="error"'
    assert samples(telemetry)[f"tidegate_request_duration_seconds_sum{{{labels}}}"] == 3.0


def test_an_answer_without_content_has_no_time_to_first_token() -> None:
    telemetry = Telemetry(["demo"])
    telemetry.record(row(ttft_ms=None))
    labels = 'dialect="chat",model="demo",outcome="ok"'
    assert samples(telemetry)[f"tidegate_ttft_seconds_count{{{labels}}}"] == 0


def test_two_gateways_in_one_process_count_apart() -> None:
    first, second = Telemetry(["demo"]), Telemetry(["demo"])
    first.record(row())
    second.record(row())
    assert [v for n, v in samples(first).items() if n.startswith("tidegate_requests_total")] == [1]


def test_requests_under_way_are_shown() -> None:
    telemetry, accounting = observed()
    meter = RequestMeter(Request("req_1", "chat", "demo"), Principal("web"), accounting)
    assert samples(telemetry)["tidegate_requests_in_flight"] == 1
    meter.close(200, "ok")
    assert samples(telemetry)["tidegate_requests_in_flight"] == 0


def test_a_store_that_never_answered_is_down() -> None:
    telemetry, _ = observed()
    assert samples(telemetry)["tidegate_store_up"] == 0


def test_providers_gauges_carry_their_name() -> None:
    telemetry, _ = observed(
        FakeProvider("one", {"kv_blocks_free": 7, "odd name!": 1}),
        FakeProvider("two", {"kv_blocks_free": 9}),
    )
    got = samples(telemetry)
    assert got['tidegate_provider_kv_blocks_free{provider="one"}'] == 7
    assert got['tidegate_provider_kv_blocks_free{provider="two"}'] == 9
    assert got['tidegate_provider_odd_name_{provider="one"}'] == 1
    assert got['tidegate_provider_ready{provider="two"}'] == 1


def test_a_gauge_that_a_provider_no_longer_tells_is_gone() -> None:
    stats = {"queue": 3.0}
    telemetry, _ = observed(FakeProvider("one", stats))
    assert 'tidegate_provider_queue{provider="one"}' in samples(telemetry)
    stats.clear()
    assert 'tidegate_provider_queue{provider="one"}' not in samples(telemetry)


def test_a_provider_that_fails_to_tell_does_not_hide_the_others() -> None:
    telemetry, _ = observed(FakeProvider("broken", None), FakeProvider("fine", {"queue": 3}))
    assert samples(telemetry)['tidegate_provider_queue{provider="fine"}'] == 3


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    telemetry, _ = observed(FakeProvider("one", {}))
    telemetry.record(row())
    body = telemetry.render()[0].decode()
    shown = set(re.findall(r"^# TYPE (\S+)", body, re.MULTILINE))
    documented = set(re.findall(r"^\| `(tidegate_\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert shown == documented


# -- Logs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What was logged; the process's own logging is put back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("tidegate")
    before = root.handlers[:], root.level, ours.level
    yield lambda: capsys.readouterr().err
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def test_a_json_line_holds_message_level_and_extra_fields(stderr: Callable[[], str]) -> None:
    configure_logging(TelemetryConfig(log_format="json"))
    logging.getLogger("tidegate").info("route %s", "opened", extra={"request_id": "req_1"})
    line = json.loads(stderr())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line.pop("pid") > 0
    assert line == {
        "level": "info",
        "logger": "tidegate",
        "message": "route opened",
        "request_id": "req_1",
    }


def test_a_json_line_stays_one_line_with_its_traceback_inside(stderr: Callable[[], str]) -> None:
    configure_logging(TelemetryConfig(log_format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("tidegate").exception("failed", extra={"path": Path("/tmp")})
    (text,) = stderr().splitlines()
    line = json.loads(text)
    assert "ValueError: two\nlines" in line["error"]
    assert line["path"] == "/tmp"


def test_a_text_line_reads_like_one(stderr: Callable[[], str]) -> None:
    configure_logging(TelemetryConfig(log_format="text"))
    logging.getLogger("tidegate").warning("slow", extra={"request_id": "req_1"})
    assert re.fullmatch(r"[\d-]{10} [\d:]{8}\.\d{3} warning slow request_id=req_1\n", stderr())


def test_a_level_below_the_configured_one_is_silent(stderr: Callable[[], str]) -> None:
    configure_logging(TelemetryConfig(log_level="warning"))
    logging.getLogger("tidegate").info("quiet")
    logging.getLogger("elsewhere").info("quiet")
    assert stderr() == ""


def test_refused_requests_and_open_targets_are_shown() -> None:
    telemetry, _ = observed()
    text = telemetry.render()[0].decode()
    assert 'tidegate_requests_refused_total{dialect="chat",status="401"} 1.0' in text
    assert 'tidegate_target_open{target="up/m"} 1.0' in text
