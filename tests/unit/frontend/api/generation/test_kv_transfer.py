"""`kv_transfer_params`: a prompt is handed over and taken over; other values are refused by name."""

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.cache import CacheConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, pack_ids
from atom.shared.messages.kv_peers import Lease, LeasedBlocks
from frontend.text import input_processor
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import running_frontend
from tests.helpers.servers.rig import MINIMAL, PATHS, TEMPLATE, Rig

LEASE = Lease("tcp://127.0.0.1:5601", 3, 7, "ab" * 16, seal=b"s" * 32)
LEASED = LeasedBlocks(LEASE, 3, b"c" * 32, [pack_ids([5, 4, 9]), pack_ids([2])])
PARAMS: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "ab" * 16,
    "remote_block_ids": [[5, 4, 9], [2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
    "remote_lease": {
        "slot": 3,
        "generation": 7,
        "length": 3,
        "content": base64.b64encode(b"c" * 32).decode(),
        "seal": base64.b64encode(b"s" * 32).decode(),
    },
}
FIRST_LEG: dict[str, Any] = {"do_remote_decode": True, "remote_engine_id": None, "remote_host": None}


def script(request: AddRequest) -> Script:
    """Some blocks are kept, but for prompts of one token."""
    is_kept = request.stores_prompt and len(request.prompt_ids) > 4
    return Script([5, 9][: request.max_tokens], FinishReason.MAX_TOKENS, leased=LEASED if is_kept else None)


@contextmanager
def rig_of(directory: Path, role: str = "", server: ServerConfig | None = None) -> Iterator[Rig]:
    directory.mkdir(exist_ok=True)
    made = tiny_tokenizer.checkpoint(directory, max_model_len=10_000)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    cache = CacheConfig(kv_transfer_config=json.dumps(transfer) if role else None)
    with FakeCore(directory, script, max_model_len=10_000) as core, ExitStack() as stack:
        yield Rig(stack.enter_context(running_frontend(core, made, server, cache=cache)), core)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_of(tmp_path_factory.mktemp("both"), "kv_both") as rig:
        yield rig


def changed(**fields: Any) -> dict[str, Any]:
    lease = PARAMS["remote_lease"] | fields.pop("remote_lease", {})
    return PARAMS | {"remote_lease": lease} | fields


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_prompt_is_handed_over(both: Rig, endpoint: str) -> None:
    first = both.run(endpoint, max_tokens=1, kv_transfer_params=FIRST_LEG)
    assert first.sent.stores_prompt and first.sent.leased is None and first.sent.max_tokens == 1
    assert first.response["kv_transfer_params"] == PARAMS
    for stream in (False, True):
        second = both.run(
            endpoint,
            stream=stream,
            n=2,
            max_tokens=2,
            kv_transfer_params=first.response["kv_transfer_params"],
        )
        assert second.sent.leased == LEASED and not second.sent.stores_prompt
        assert "kv_transfer_params" not in second.response
    for nothing in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False, "pp_size": None}):
        plain = both.run(endpoint, max_tokens=1, kv_transfer_params=nothing)
        assert not plain.sent.stores_prompt and plain.sent.leased is None
        assert "kv_transfer_params" not in plain.response


def test_of_a_short_prompt_nothing_is_kept(both: Rig) -> None:
    ran = both.run("completions", prompt=[7], max_tokens=1, kv_transfer_params=FIRST_LEG)
    assert ran.sent.stores_prompt and ran.response["kv_transfer_params"] is None
    assert both.run("completions", kv_transfer_params=None).sent.leased is None


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"stream": True, "kv_transfer_params": FIRST_LEG}, "", "omit 'stream'"),
        ({"n": 2, "kv_transfer_params": FIRST_LEG}, "", "omit 'n'"),
        ({"prompt": ["a", "b"], "kv_transfer_params": FIRST_LEG}, "", "send a request for each"),
        ({"prompt": ["a", "b"], "kv_transfer_params": PARAMS}, "", "send a request for each"),
        ({"kv_transfer_params": changed(do_remote_decode=True)}, "", "a server does one of them"),
        ({"kv_transfer_params": changed(do_remote_prefill=False)}, "", "without do_remote_prefill"),
        ({"kv_transfer_params": {"remote_host": "127.0.0.1"}}, "", "without do_remote_prefill"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, ".do_remote_decode", "expected `bool | null`"),
        ({"kv_transfer_params": FIRST_LEG | {"pp_size": 2}}, ".pp_size", "is not a field of this server"),
        ({"kv_transfer_params": [1]}, "", "expected `object | null`"),
        *(
            ({"kv_transfer_params": PARAMS | {name: None}}, f".{name}", "lacks this field")
            for name in (
                *("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_lease"),
            )
        ),
        *(
            ({"kv_transfer_params": changed(remote_host=host)}, ".remote_host", "--kv-transfer-peers")
            for host in ("10.0.0.7", "127.0.0.2", "localhost", "127.0.0.1:9#", "")
        ),
        (
            {"kv_transfer_params": changed(remote_port=22)},
            ".remote_host",
            "is '127.0.0.1', port 22, which is not",
        ),
        ({"kv_transfer_params": changed(remote_port=5599)}, ".remote_host", "--kv-transfer-peers"),
        ({"kv_transfer_params": changed(remote_port=0)}, ".remote_port", "expected `int` >= 1"),
        ({"kv_transfer_params": changed(remote_host="1" * 65)}, ".remote_host", "length <= 64"),
        (
            {"kv_transfer_params": changed(remote_block_ids=[[1, 2, 3, 4]])},
            ".remote_block_ids",
            "more blocks",
        ),
        (
            {"kv_transfer_params": changed(remote_block_ids=[[0] * 6000] * 2, remote_lease={"length": 6000})},
            ".remote_block_ids",
            "has 12000 blocks, and no prompt of this server more than 10000",
        ),
        (
            {"kv_transfer_params": changed(remote_block_ids=[[-1]])},
            ".remote_block_ids[0][0]",
            "expected `int` >= 0",
        ),
        ({"kv_transfer_params": changed(remote_block_ids=[1])}, ".remote_block_ids[0]", "`array`"),
        ({"kv_transfer_params": changed(remote_lease={"slot": 4096})}, ".remote_lease.slot", "<= 4095"),
        ({"kv_transfer_params": changed(remote_lease={"length": 0})}, ".remote_lease.length", ">= 1"),
        (
            {"kv_transfer_params": changed(remote_lease={"seal": "AAAA"})},
            ".remote_lease.seal",
            "length >= 32",
        ),
        ({"kv_transfer_params": changed(remote_lease={"seal": "?"})}, ".remote_lease.seal", "base64"),
        ({"kv_transfer_params": changed(remote_lease={"more": 1})}, ".remote_lease", "unknown field `more`"),
    ],
)
def test_what_cannot_be_done_is_refused(both: Rig, fields: dict[str, Any], param: str, text: str) -> None:
    error = both.refused("completions", **fields)
    assert error["param"] == f"kv_transfer_params{param}" and text in error["message"]


def test_more_blocks_than_a_message_holds_are_refused(both: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_processor, "MAX_ADD_REQUEST_BYTES", 4096)
    params = changed(remote_block_ids=[list(range(2000))], remote_lease={"length": 2000})
    assert both.run("completions").sent.leased is None
    assert "at most 4096 are possible" in both.refused("completions", kv_transfer_params=params)["message"]


def test_each_server_has_its_role(tmp_path: Path) -> None:
    with rig_of(tmp_path / "producer", "kv_producer") as rig:
        assert rig.run("chat", kv_transfer_params=FIRST_LEG).response["kv_transfer_params"] == PARAMS
        error = rig.refused("chat", kv_transfer_params=PARAMS)
        assert "has do_remote_prefill, for which this server was not started" in error["message"]
    with rig_of(tmp_path / "consumer", "kv_consumer") as rig:
        assert rig.run("chat", kv_transfer_params=PARAMS).sent.leased == LEASED
        error = rig.refused("chat", kv_transfer_params=FIRST_LEG)
        assert (error["param"], error["code"]) == ("kv_transfer_params", "unsupported_parameter")
        assert "see NixlConnector in --kv-transfer-config" in error["message"]


def test_another_server_refuses_it(tmp_path: Path) -> None:
    with rig_of(tmp_path / "plain") as rig:
        for params in (PARAMS, FIRST_LEG):
            error = rig.refused("completions", kv_transfer_params=params)
            assert "see NixlConnector in --kv-transfer-config" in error["message"]
        assert rig.run("completions", kv_transfer_params={}).sent.leased is None
    with rig_of(tmp_path / "lenient", server=ServerConfig(lenient_fields=True)) as rig:
        ran = rig.run("completions", kv_transfer_params=PARAMS)
        assert ran.sent.leased is None and "it was left out" in ran.response["warnings"][0]


def test_the_endpoints_without_choices_have_no_such_field(both: Rig) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        body = {"messages": MINIMAL["chat"]["messages"], "max_tokens": 4}
        body = {"input": "hi"} if path.endswith("responses") else body
        status, response = both.client.post(path, **body, kv_transfer_params=FIRST_LEG)
        assert status == 400 and "kv_transfer_params" in json.dumps(response)
