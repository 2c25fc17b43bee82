from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace

import pytest

from gateway.auth import NO_KEY, Authenticator, Headers, masked
from gateway.config import AuthConfig, KeyConfig, KeyDigest
from plugins.errors import AuthenticationFailed
from plugins.interfaces import Limits

KEY = "sk-abcdefghijklmnopqrstuvwxyz"


def digest(key: str) -> KeyDigest:
    return KeyDigest(hashlib.sha256(key.encode()).digest())


@pytest.fixture
def authenticator() -> Authenticator:
    limits = Limits(rpm=7)
    keys = (
        KeyConfig("web", digest(KEY)),
        KeyConfig("batch", digest("sk-other-key-of-the-batch"), models=("m1",), limits=limits),
    )
    return Authenticator(AuthConfig(mode="keys", keys=keys))


def refusal(authenticator: Authenticator, headers: Headers) -> AuthenticationFailed:
    with pytest.raises(AuthenticationFailed) as caught:
        authenticator.check(headers)
    return caught.value


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_bearer_key_names_its_principal_whatever_the_schemes_case(
    authenticator: Authenticator, scheme: str
) -> None:
    assert authenticator.check([(b"authorization", f"{scheme} {KEY}".encode())]).name == "web"


def test_x_api_key_is_taken_as_well(authenticator: Authenticator) -> None:
    assert authenticator.check([(b"host", b"x"), (b"x-api-key", KEY.encode())]).name == "web"


def test_the_bearer_key_wins_over_x_api_key(authenticator: Authenticator) -> None:
    headers = [(b"x-api-key", b"sk-wrong"), (b"authorization", b"Bearer " + KEY.encode())]
    assert authenticator.check(headers).name == "web"


def test_another_scheme_leaves_room_for_x_api_key(authenticator: Authenticator) -> None:
    headers = [(b"authorization", b"Basic YTpi"), (b"x-api-key", KEY.encode())]
    assert authenticator.check(headers).name == "web"


def test_white_space_around_the_key_does_not_matter(authenticator: Authenticator) -> None:
    assert authenticator.check([(b"authorization", f"Bearer   {KEY}  ".encode())]).name == "web"


def test_a_principal_carries_its_models_and_limits(authenticator: Authenticator) -> None:
    principal = authenticator.check([(b"x-api-key", b"sk-other-key-of-the-batch")])
    assert (principal.may_use("m1"), principal.may_use("m2")) == (True, False)
    assert principal.limits == Limits(rpm=7)


def test_a_key_for_all_models_may_use_those_added_later(authenticator: Authenticator) -> None:
    assert authenticator.check([(b"x-api-key", KEY.encode())]).models is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer  ")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic YTpi")],
        [(b"x-api-key", b" ")],
    ],
    ids=["none", "empty", "no key", "blank key", "no scheme", "basic", "blank x-api-key"],
)
def test_without_a_key_the_answer_says_how_to_send_one(
    authenticator: Authenticator, headers: Headers
) -> None:
    error = refusal(authenticator, headers)
    assert (error.status, error.type, error.code) == (401, "invalid_request_error", None)
    assert error.message == NO_KEY


def test_a_wrong_key_is_refused_with_its_code_and_shown_masked(
    authenticator: Authenticator,
) -> None:
    error = refusal(authenticator, [(b"authorization", b"Bearer sk-abwrongwrongwrongyz")])
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert error.message == "Incorrect API key provided: sk-ab***yz."


@pytest.mark.parametrize("changed", [KEY[:-1], KEY + "x", KEY.upper(), KEY[1:], f"{KEY} {KEY}"])
def test_a_key_must_be_equal_to_the_last_character(
    authenticator: Authenticator, changed: str
) -> None:
    assert refusal(authenticator, [(b"x-api-key", changed.encode())]).code == "invalid_api_key"


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (b"sk-test", "***"),
        (b"sk-15-letters-x", "***"),
        (b"sk-16-letters-xy", "sk-16***xy"),
        (b"\xff" * 40, "***"),
        (b"abcd\x1b" + b"x" * 40, "***"),
        (b"k" * 2_000_000, "kkkkk***kk"),
    ],
)
def test_a_masked_key_is_short_printable_and_never_whole(key: bytes, shown: str) -> None:
    assert masked(key) == shown


def test_a_header_of_megabytes_is_refused_without_being_hashed(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gateway.auth"], "hashlib", SimpleNamespace())
    assert refusal(authenticator, [(b"x-api-key", b"k" * 1_000_000)]).code == "invalid_api_key"


def test_in_open_mode_every_caller_is_the_principal_open() -> None:
    authenticator = Authenticator(AuthConfig(mode="open"))
    for headers in ([], [(b"authorization", b"Bearer nonsense")]):
        principal = authenticator.check(headers)
        assert (principal.name, principal.models) == ("open", None)


def test_the_authenticator_holds_digests_only(authenticator: Authenticator) -> None:
    assert KEY not in repr(vars(authenticator))
