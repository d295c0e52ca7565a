"""A server on one host computes prompts, and one on another host reads their blocks over the network."""

import asyncio
import json
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers.checkpoints.tiny_models import prompt_of
from tests.helpers.servers.nodes import ARGS, Host, NodeProcess, inside, network_hosts
from tests.helpers.servers.prompt_router import Router, loaded, post, text_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]
PROMPT = prompt_of(200, 3)
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def started(host: Host, model: str, role: str, *flags: str) -> NodeProcess:
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    listens = ("--host", host.address, "--server-port", "0")
    return NodeProcess(
        0, host, ["--model", model, *ARGS, *listens, "--kv-transfer-config", transfer, *flags], {}
    )


def test_blocks_are_read_over_the_network(model: str) -> None:
    with network_hosts(2) as (first, second), ExitStack() as stack:
        producer = started(first, model, "kv_producer", "--kv-transfer-host", first.address)
        stack.callback(producer.kill)
        consumer = started(second, model, "kv_consumer", "--kv-transfer-peers", f"{first.address}/32")
        stack.callback(consumer.kill)
        for server in (producer, consumer):
            server.until("ready .*http")

        async def run() -> None:
            expected = text_of(await post(producer, BODY))
            found = await Router(producer, consumer).run(BODY)
            assert text_of(found) == expected and loaded(consumer) == len(PROMPT) // 16
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16

        try:
            inside(second, lambda: asyncio.run(run()))
        except BaseException:
            print(producer.text(), consumer.text())
            raise
