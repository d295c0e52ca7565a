"""Seals of leases: proof that an engine keeps just these blocks, for readers of leases that clients carry.

Only those who can reach the ports of the engine's workers learn its secret: the workers of other servers.
Without a seal, a client could name blocks of others' prompts, which would then be cached as those of its own.
"""

import hashlib
import hmac
import secrets

import msgspec

from atom.shared.messages.kv_peers import Lease, LeasedBlocks

__all__ = ["engine_name", "is_sealed", "new_secret", "seal", "with_statement"]

_encode = msgspec.msgpack.encode
_SECRET_BYTES = 32
_NAME_DIGITS = 32


def new_secret() -> bytes:
    """The secret of one life of an engine."""
    return secrets.token_bytes(_SECRET_BYTES)


def engine_name(secret: bytes) -> str:
    """Names the life of an engine without telling its secret."""
    return hashlib.sha256(b"engine" + secret).hexdigest()[:_NAME_DIGITS]


def with_statement(leased: LeasedBlocks) -> Lease:
    """The lease of these blocks, and a hash that stands for them in its seal."""
    blocks = _encode([leased.length, leased.content, leased.tables])
    return msgspec.structs.replace(leased.lease, statement=hashlib.sha256(blocks).digest())


def seal(lease: Lease, secret: bytes) -> bytes:
    """The seal of a lease that has its statement."""
    return hmac.digest(secret, _encode([lease.slot, lease.generation, lease.statement]), "sha256")


def is_sealed(lease: Lease, secret: bytes) -> bool:
    """Whether the owner of the secret has granted this lease, for the blocks of its statement."""
    return hmac.compare_digest(lease.seal, seal(lease, secret))
