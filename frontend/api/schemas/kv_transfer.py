"""`kv_transfer_params`: vLLM's field by which routers let one server compute a prompt, and another one go on.

router ── {"do_remote_decode": true} ──▶ server for prompts: keeps its blocks
       ◀── KVTransferParams ───────────
       ── the same object ────────────▶ server that generates: reads them
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atom.shared.messages.kv_peers import LEASE_SLOTS
from frontend.api.schemas.fields import Schema

__all__ = ["KV_TRANSFER_PARAMS", "KVTransferParams", "RemoteLease"]

_Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
_MOST_BLOCKS = 1 << 22
_MOST_GROUPS = 64


class RemoteLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Under which name a server keeps the blocks, and proof that it does. No field of vLLM's."""

    slot: Annotated[int, Meta(ge=0, lt=LEASE_SLOTS)]
    generation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    length: Annotated[int, Meta(ge=1, le=_MOST_BLOCKS)]
    """Blocks of the prompt's beginning."""
    content: _Hash
    """A hash of the prompt's tokens in these blocks, in base64 as the next field."""
    seal: _Hash


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a router sends, and what it sends on. Names and meaning are vLLM's, but of the last field."""

    do_remote_decode: bool | None = None
    """Keep the blocks of this prompt for another server; the response says where they are."""
    do_remote_prefill: bool | None = None
    """Read the blocks of this prompt from another server, whose response had these values."""
    remote_engine_id: Annotated[str, Meta(max_length=64)] | None = None
    remote_block_ids: (
        Annotated[list[Annotated[list[_Block], Meta(max_length=_MOST_BLOCKS)]], Meta(max_length=_MOST_GROUPS)]
        | None
    ) = None
    """By KV group."""
    remote_host: Annotated[str, Meta(max_length=64)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    tp_size: Annotated[int, Meta(ge=1)] | None = None
    """Workers of the other engine: as many as of this one, or nothing is read."""
    remote_lease: RemoteLease | None = None


KV_TRANSFER_PARAMS: Schema[Any] = Schema(KVTransferParams, neutral={}, harmless=frozenset())
