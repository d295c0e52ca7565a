"""Fetches images from the hosts of --allowed-media-domains.

What a client names is not trusted: only listed hosts, also after a redirect; only public addresses, which are
checked as a socket is made for them, so that a name that resolves otherwise a second time gains nothing; no
proxy of the environment; bounded in bytes, seconds and number.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from atom.shared.messages.images import MAX_FILE_BYTES
from frontend.errors import OverloadedError, RequestError

__all__ = ["ImageFetcher", "check_url", "is_public"]

_DEADLINE_S = 10.0
_QUEUE_S = 20.0
_RETRY_AFTER_S = 5
_MAX_REDIRECTS = 3
_MAX_PARALLEL = 8
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
# Networks whose addresses stand for those of IPv4: 6to4, Teredo and NAT64.
_TRANSLATED = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")))


class PrivateAddressError(OSError):
    """A host has an address that is not public."""


class ImageFetcher:
    """Fetches one file at a time for each request, a few at a time in all."""

    def __init__(
        self,
        domains: frozenset[str],
        resolver: AbstractResolver | None = None,
        allows: Callable[[str], bool] | None = None,
    ):
        """`domains` as `media_domains` returns them; `allows`: whether an address may be connected to."""
        self._domains = domains
        self._resolver = resolver
        self._allows = allows or is_public
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)

    async def fetch(self, url: str, field: str) -> bytes:
        """The file. Raises RequestError, which names `field`; OverloadedError if others take too long."""
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._slots.acquire()
        except TimeoutError:
            raise OverloadedError(
                f"{_MAX_PARALLEL} images are being fetched, and others wait: try again later", _RETRY_AFTER_S
            ) from None
        try:
            return await self._fetched(url, field)
        finally:
            self._slots.release()

    async def _fetched(self, url: str, field: str) -> bytes:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._fetch(URL(url), field)
        except RequestError:
            raise
        except TimeoutError:
            reason = f"it took more than {_DEADLINE_S:g} s"
        except aiohttp.ClientConnectorError as error:
            cause = error.os_error
            reason = str(cause) if isinstance(cause, PrivateAddressError) else "no connection to its host"
        except (aiohttp.ClientError, ValueError) as error:
            reason = type(error).__name__
        raise RequestError(f"'{field}' could not be fetched: {reason}", param=field)

    async def _fetch(self, url: URL, field: str) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            socket_factory=self._socket,
            use_dns_cache=False,
            force_close=True,
        )
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "atom"}
        # Nothing is decompressed: a few bytes could become any number.
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            for _ in range(_MAX_REDIRECTS + 1):
                async with session.get(url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await _content(response, field)
                    url = url.join(URL(response.headers.get("Location", "")))
                check_url(str(url), self._domains, field)
        raise RequestError(
            f"'{field}' could not be fetched: it has more than {_MAX_REDIRECTS} redirects", param=field
        )

    def _socket(
        self,
        addr_info: tuple[
            int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str | int, ...]
        ],
    ) -> socket.socket:
        """A socket for this address. Raises PrivateAddressError for one that must not be reached."""
        family, kind, protocol, _, address = addr_info
        host = str(address[0])
        if not self._allows(host):
            raise PrivateAddressError(f"its host has the address {host}, which is not public")
        return socket.socket(family, kind, protocol)


def check_url(url: str, domains: frozenset[str], field: str) -> None:
    """Raise RequestError unless it is an http or https URL of a listed host."""
    try:
        parsed = URL(url)
        host, port = (parsed.raw_host or "").lower(), parsed.port
    except ValueError:
        host, port, parsed = "", None, URL()
    if parsed.scheme not in ("http", "https") or not host or parsed.user is not None or parsed.password:
        raise RequestError(
            f"'{field}' has no URL that can be fetched: give https://HOST/PATH, without user and password, "
            "or the image itself, as data:image/png;base64,…",
            param=field,
        )
    name = f"[{host}]" if ":" in host else host
    if f"{name}:{port}" in domains or (parsed.is_default_port() and name in domains):
        return
    shown = name if parsed.is_default_port() else f"{name}:{port}"
    raise RequestError(
        f"'{field}' is at {shown:.80}, which --allowed-media-domains does not list: send the image itself, "
        "as data:image/png;base64,…",
        param=field,
        code="unsupported_parameter",
    )


def is_public(address: str) -> bool:
    """Whether an IP address is of the internet: not private, loopback, link-local, multicast or reserved."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif any(parsed in network for network in _TRANSLATED):
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


async def _content(response: aiohttp.ClientResponse, field: str) -> bytes:
    """The body. Raises RequestError for another status than 200, and for one that is encoded or too long."""
    if response.status != 200:
        raise RequestError(
            f"'{field}' could not be fetched: its host answered with status {response.status}", param=field
        )
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError(f"'{field}' could not be fetched: its host compressed it", param=field)
    content = bytearray()
    length = response.content_length or 0
    while length <= MAX_FILE_BYTES and (chunk := await response.content.read(_CHUNK)):
        content += chunk
        length = max(length, len(content))
    if length > MAX_FILE_BYTES:
        raise RequestError(
            f"'{field}' has more than {MAX_FILE_BYTES} bytes: use a smaller image", param=field, status=413
        )
    return bytes(content)
