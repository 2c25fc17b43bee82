"""Base URLs and headers: what may be sent, and what is refused without being shown."""

from __future__ import annotations

import pytest

from plugins.providers.http_message import header_fault, header_lines, parse_base_url

# -- URLs and headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://a", "a", "/x"),
        ("http://a:80/v1/", "a", "/v1/x"),
        ("https://a:443/v1", "a", "/v1/x"),
        ("https://a:80/v1", "a:80", "/v1/x"),
        ("http://[::1]:8000/v1", "[::1]:8000", "/v1/x"),
        ("https://bücher.example/v1", "xn--bcher-kva.example", "/v1/x"),
        ("https://a/deployments/d?api-version=1", "a", "/deployments/d/x?api-version=1"),
    ],
)
def test_a_base_url_gives_host_and_target(url: str, authority: str, target: str) -> None:
    base_url = parse_base_url(url)
    assert (base_url.authority, base_url.target("/x")) == (authority, target)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "http://"),
        ("ftp://a", "http://"),
        ("a.example/v1", "http://"),
        ("http://", "host"),
        ("http://a:99999", "valid"),
        ("http://[::1", "valid"),
        ("http://user:pass@a", "credentials"),
        ("http://a/#x", "fragment"),
        ("http://a/b c", "percent-encoded"),
        ("http://a/\r\nx: y", "percent-encoded|valid"),
    ],
)
def test_a_bad_base_url_is_refused_without_showing_it(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_base_url(url)
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x y", "1"),
        ("x\r\n", "1"),
        ("", "1"),
        ("x", "a\r\nb: c"),
        ("x", "a\0"),
        ("x", " a"),
        ("x", "ж"),
    ],
)
def test_a_header_that_could_break_its_line_is_refused(name: str, value: str) -> None:
    assert header_fault(name, value) is not None
    with pytest.raises(ValueError, match="header"):
        header_lines({name: value})


def test_headers_of_the_connection_itself_are_not_configured() -> None:
    assert header_fault("Content-Length", "1") is not None
    assert header_fault("X-Title", "my app") is None
