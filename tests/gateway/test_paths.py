import pytest

from gateway.paths import canonical_path


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/models/owner/name", "/v1/models/owner/name"),
        ("/v1/v1/chat/completions", "/v1/v1/chat/completions"),
        ("/livez/", "/livez"),
        ("/", "/"),
        ("", "/"),
    ],
)
def test_every_spelling_of_a_path_comes_to_one(path: str, canonical: str) -> None:
    assert canonical_path(path) == canonical
