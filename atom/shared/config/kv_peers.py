"""Servers that hand over prompts with NixlConnector: what this one does, and who the others are."""

from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network

from atom.shared.config.cache import DEFAULT_TRANSFER_PORT, CacheConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_transfer import kv_role, reads_peers
from atom.shared.config.parallel import ParallelConfig
from atom.shared.utils.errors import one_line

__all__ = ["PeerServers", "PromptTransfer", "check_prompt_transfer", "prompt_transfer"]

_MOST_WORKERS = 1024
"""Most workers of a server whose blocks others read; from its first port on, so many are connected to."""
_LAST_PORT = 65535
_HOST = "--kv-transfer-host"
_PORT = "--kv-transfer-port"
_PEERS = "--kv-transfer-peers"


@dataclass(frozen=True)
class PeerServers:
    """Servers of one network, all with the same --kv-transfer-port."""

    network: IPv4Network
    port: int

    def have(self, host: IPv4Address, port: int) -> bool:
        """Whether a worker of theirs may listen there."""
        return host in self.network and self.port <= port < self.port + _MOST_WORKERS


@dataclass(frozen=True)
class PromptTransfer:
    """What requests with `kv_transfer_params` may ask of this server."""

    gives: bool = False
    """Whether it keeps the blocks of prompts for other servers."""
    takes: bool = False
    """Whether it reads those of others."""
    host: str = ""
    """Where it is read."""
    port: int = 0
    """First of the ports there."""
    peers: tuple[PeerServers, ...] = ()
    """Those that it reads."""

    @property
    def is_local(self) -> bool:
        """Whether all others are on this host."""
        own = not self.gives or IPv4Address(self.host).is_loopback
        return own and (not self.takes or all(each.network.is_loopback for each in self.peers))

    def may_read(self, host: str, port: int) -> bool:
        """Whether a request may name a worker there, as `remote_host` and `remote_port`."""
        try:
            address = IPv4Address(host)
        except AddressValueError:
            return False
        return any(each.have(address, port) for each in self.peers)


def prompt_transfer(cache: CacheConfig, parallel: ParallelConfig) -> PromptTransfer:
    """What --kv-transfer-config says of other servers; with --prefill-engines there are none.

    Raises ConfigError for addresses that are none.
    """
    if not reads_peers(cache) or parallel.prefill_engines:
        return PromptTransfer()
    role = kv_role(cache)
    peers = tuple(_peers(text.strip()) for text in cache.kv_transfer_peers.split(","))
    return PromptTransfer(
        role != "kv_consumer",
        role != "kv_producer",
        _own_address(cache.kv_transfer_host),
        cache.kv_transfer_port,
        peers,
    )


def check_prompt_transfer(cache: CacheConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError for what cannot be done between servers."""
    transfer = prompt_transfer(cache, parallel)
    if not (transfer.gives or transfer.takes):
        return
    if parallel.lockstep:
        raise ConfigError(
            "--kv-transfer-config: NixlConnector is not supported for engines that share experts, which step "
            "together: omit --enable-expert-parallel"
        )
    if transfer.gives:
        most = min(_MOST_WORKERS, _LAST_PORT + 1 - transfer.port)
        if (workers := parallel.num_workers) > most:
            raise ConfigError(
                f"{_PORT} {transfer.port} leaves {most} ports for the {workers} workers of this server: "
                "lower it, or use several servers"
            )


def _own_address(text: str) -> str:
    try:
        address = IPv4Address(text)
    except AddressValueError:
        raise ConfigError(f"{_HOST}: {text!r:.80} is not an IPv4 address, such as 10.0.0.7") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"{_HOST}: other servers cannot connect to {text}: give an address of this host in their network"
        )
    return text


def _peers(text: str) -> PeerServers:
    network, colon, port = text.partition(":")
    bits = network.partition("/")[2] or "32"
    try:
        if not (bits.isdecimal() and (port or "1").isdecimal() and (port or not colon)):
            raise ValueError("bits and ports are decimal numbers")
        number = int(port) if port else DEFAULT_TRANSFER_PORT
        if not 0 < number <= _LAST_PORT:
            raise ValueError(f"{number} is no port")
        return PeerServers(IPv4Network(network), number)
    except ValueError as error:
        raise ConfigError(
            f"{_PEERS}: {text!r:.80} is neither ADDRESS[:PORT] nor NETWORK/BITS[:PORT] of IPv4, such as "
            f"10.0.0.7:5600 or 10.0.0.0/16: {one_line(error, ValueError):.120}"
        ) from None
