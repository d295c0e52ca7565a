"""Cross-origin requests: preflights, and the headers of responses, errors and streams."""

from collections.abc import Iterator
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason
from frontend.errors import RequestError
from frontend.http.cors import CorsPolicy
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend

PAGE = "https://chat.example.org"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
# What the openai package sends from a browser.
SDK_HEADERS = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
KEY = {"Origin": PAGE, "Authorization": "Bearer key"}


def script(request: AddRequest) -> Script:
    return Script([70] * 3, FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with (
        FakeCore(tmp_path_factory.mktemp("core"), script) as core,
        running_frontend(core, checkpoint, ServerConfig(api_key="key"), wait=False) as client,
    ):
        core.wait_for(lambda: client.exchange("GET", "/ready")[0] == 200)
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/org/tiny", "/health"])
def test_a_preflight_needs_no_key(client: Client, path: str) -> None:
    headers = PREFLIGHT | {"Access-Control-Request-Headers": SDK_HEADERS}
    status, body, got = client.exchange("OPTIONS", path, headers=headers)
    assert (status, body) == (204, b"")
    assert got["access-control-allow-origin"] == "*"
    assert got["access-control-allow-methods"] == "POST"
    assert got["access-control-allow-headers"] == SDK_HEADERS


def test_other_options_requests_are_refused(client: Client) -> None:
    status, _, headers = client.exchange("OPTIONS", "/v1/completions", headers=KEY)
    assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "fields", "key", "status"),
    [
        ("/v1/completions", {"prompt": "x"}, True, 200),
        ("/v1/completions", {"prompt": "x", "stream": True}, True, 200),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, True, 400),
        ("/v1/completions", {"prompt": "x"}, False, 401),
        ("/v1/nothing", {}, True, 404),
        ("/health", {}, True, 405),
    ],
)
def test_a_page_can_read_responses_and_errors(
    client: Client, path: str, fields: dict[str, Any], key: bool, status: int
) -> None:
    headers = KEY if key else {"Origin": PAGE}
    got, _, received = client.exchange("POST", path, fields, headers=headers)
    assert (got, received["access-control-allow-origin"]) == (status, "*")
    assert "X-Request-Id" in received["access-control-expose-headers"]
    assert "Retry-After" in received["access-control-expose-headers"]


def test_requests_from_no_page_get_no_such_headers(client: Client) -> None:
    _, _, headers = client.exchange("GET", "/v1/models", headers={"Authorization": "Bearer key"})
    assert not [name for name in headers if name.startswith("access-control")]


NAMED = ServerConfig(
    allowed_origins=f"{PAGE},http://localhost:3000",
    allowed_methods="GET,POST",
    allowed_headers="Content-Type,Authorization",
    allow_credentials=True,
)


def test_only_named_pages_are_allowed() -> None:
    policy = CorsPolicy(NAMED)
    allowed = policy.response_headers({"Origin": "http://localhost:3000"})
    assert allowed["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert (allowed["Access-Control-Allow-Credentials"], allowed["Vary"]) == ("true", "Origin")
    for headers in ({"Origin": "https://evil.example.org"}, {"Origin": "null"}, {}):
        assert policy.response_headers(headers) == {"Vary": "Origin"}


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"Origin": "http://localhost"}, "--allowed-origins"),
        ({"Access-Control-Request-Method": "DELETE"}, "--allowed-methods"),
        ({"Access-Control-Request-Headers": "content-type, x-other"}, "--allowed-headers"),
    ],
)
def test_a_refused_preflight_names_the_setting(change: dict[str, str], flag: str) -> None:
    headers = PREFLIGHT | {"Access-Control-Request-Headers": "content-type, authorization"}
    CorsPolicy(NAMED).check(headers)
    with pytest.raises(RequestError, match=flag) as caught:
        CorsPolicy(NAMED).check(headers | change)
    assert caught.value.status == 403


def test_credentials_need_named_origins() -> None:
    with pytest.raises(ValueError, match="--allowed-origins"):
        CorsPolicy(ServerConfig(allow_credentials=True))
