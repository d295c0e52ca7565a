"""Prompts that another server goes on with, or has computed: `kv_transfer_params`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from atom.shared.config.kv_peers import PromptTransfer
from atom.shared.messages.engine import pack_ids, unpack_ids
from atom.shared.messages.kv_peers import Lease, LeasedBlocks
from frontend.api.schemas.generation import GenerationRequest
from frontend.api.schemas.kv_transfer import KVTransferParams, RemoteLease
from frontend.errors import RequestError
from frontend.text.output_processor import SequenceOutput

__all__ = ["HandOver", "TransferRules", "response_params"]

_FIELD = "kv_transfer_params"
_NEEDED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_lease")


@dataclass(frozen=True)
class HandOver:
    """What a request asks for."""

    stores_prompt: bool = False
    """As in `AddRequest`."""
    leased: LeasedBlocks | None = None
    """As in `AddRequest`."""


@dataclass(frozen=True)
class TransferRules:
    """What requests may ask of this server."""

    transfer: PromptTransfer = field(default_factory=PromptTransfer)
    tp_size: int = 1
    is_lenient: bool = False
    """With --lenient-fields."""

    def hand_over(
        self, fields: GenerationRequest, num_prompts: int, max_model_len: int, warnings: list[str]
    ) -> HandOver:
        """What a request asks for; may append to `warnings`. Raises RequestError."""
        params = fields.kv_transfer_params
        if params is None:
            return HandOver()
        if not (params.do_remote_decode or params.do_remote_prefill):
            if any(getattr(params, name) is not None for name in _NEEDED):
                raise _refusal(
                    "says where blocks are, without do_remote_prefill: set it, or leave the rest out"
                )
            return HandOver()
        if params.do_remote_decode and params.do_remote_prefill:
            raise _refusal("has do_remote_decode and do_remote_prefill: a server does one of them")
        wanted, may = (
            ("do_remote_decode", self.transfer.gives)
            if params.do_remote_decode
            else ("do_remote_prefill", self.transfer.takes)
        )
        if not may:
            text = (
                f"'{_FIELD}' has {wanted}, for which this server was not started: see NixlConnector in "
                "--kv-transfer-config"
            )
            if not self.is_lenient:
                raise RequestError(text, param=_FIELD, code="unsupported_parameter")
            if (warning := f"{text}; it was left out") not in warnings:
                warnings.append(warning)
            return HandOver()
        if num_prompts != 1:
            raise _refusal("is for one prompt: send a request for each")
        if params.do_remote_prefill:
            return HandOver(leased=self._leased(params, max_model_len))
        if fields.stream:
            raise _refusal("with do_remote_decode is part of a response in one piece: omit 'stream'")
        if (fields.n or 1) != 1:
            raise _refusal("with do_remote_decode is for one choice: omit 'n'")
        return HandOver(stores_prompt=True)

    def _leased(self, params: KVTransferParams, max_model_len: int) -> LeasedBlocks:
        for name in _NEEDED:
            if getattr(params, name) is None:
                raise _refusal(
                    "lacks this field: send what an ATOM server has sent with do_remote_decode", f".{name}"
                )
        host, port, lease = params.remote_host, params.remote_port, params.remote_lease
        engine, groups = params.remote_engine_id, params.remote_block_ids
        assert host is not None and port is not None and lease is not None
        assert engine is not None and groups is not None
        if not self.transfer.may_read(host, port):
            raise _refusal(
                f"is {host!r}, port {port}, which is not among the servers of --kv-transfer-peers",
                ".remote_host",
            )
        if any(len(blocks) > lease.length for blocks in groups):
            raise _refusal(f"has more blocks than the {lease.length} of remote_lease", ".remote_block_ids")
        if (count := sum(map(len, groups))) > max_model_len:  # so that names cost no more than a prompt
            raise _refusal(
                f"has {count} blocks, and no prompt of this server more than {max_model_len}: send what an "
                "ATOM server has sent with do_remote_decode",
                ".remote_block_ids",
            )
        own = Lease(f"tcp://{host}:{port}", lease.slot, lease.generation, engine, seal=lease.seal)
        return LeasedBlocks(own, lease.length, lease.content, [pack_ids(blocks) for blocks in groups])


def response_params(results: Sequence[SequenceOutput], tp_size: int) -> KVTransferParams | None:
    """What a response says of the blocks that are kept for its one choice; None if there are none."""
    leased = results[0].leased
    if leased is None:
        return None
    lease = leased.lease
    host, _, port = lease.address.removeprefix("tcp://").rpartition(":")
    return KVTransferParams(
        do_remote_decode=False,
        do_remote_prefill=True,
        remote_engine_id=lease.engine,
        remote_block_ids=[unpack_ids(table).tolist() for table in leased.tables],
        remote_host=host,
        remote_port=int(port),
        tp_size=tp_size,
        remote_lease=RemoteLease(lease.slot, lease.generation, leased.length, leased.content, lease.seal),
    )


def _refusal(problem: str, name: str = "") -> RequestError:
    return RequestError(f"'{_FIELD}{name}' {problem}", param=_FIELD + name)
