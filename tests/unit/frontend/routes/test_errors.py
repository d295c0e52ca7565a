"""Unknown paths, and the path that was meant."""

from collections.abc import Iterator

import pytest

from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("errors")
    core = FakeCore(directory, lambda _: Script([70]))
    with core, running_frontend(core, tiny_tokenizer.checkpoint(directory)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/chat/completions/?a=b", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/models/a/b", "/v1/models/a/b"),
        ("/health/", "/health"),
        ("/v1/nothing", None),
        ("/nothing", None),
        ("/" + "x" * 4000, None),
        ("/%2f%2e%2e/%00", None),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_path_that_was_meant_is_named(client: Client, method: str, path: str, meant: str | None) -> None:
    status, response = client.call(method, path, {} if method == "POST" else None)
    message = response["error"]["message"]
    assert status == 404 and message.startswith("unknown path /")
    assert message.partition(": use ")[2] == (meant or "")
    assert ("/openapi.json lists" in message) == (meant is None)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/responses/compact", "'input'"),
        ("/v1/images/generations", "no images"),
        ("/apply-template", "/tokenize"),
        ("/api/chat", "/v1/chat/completions"),
        ("/v1/load_lora_adapter", "merge"),
        ("/drain", "--admin-socket"),
    ],
)
def test_routes_of_other_servers_say_what_to_use(client: Client, path: str, advice: str) -> None:
    for method in ("GET", "POST"):
        status, response = client.call(method, path, {} if method == "POST" else None)
        assert (status, response["error"]["code"]) == (404, "unsupported_route")
        assert advice in response["error"]["message"]
