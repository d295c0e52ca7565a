"""Images are fetched from listed hosts with public addresses alone, and nothing else of a URL is trusted."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

import frontend.images.image_fetcher as fetcher_module
from frontend.errors import OverloadedError, RequestError
from frontend.images.image_fetcher import ImageFetcher, check_url, is_public
from tests.helpers.servers.ports import kept_port

PIXELS = b"\x89PNG" * 1000
LOOPBACK = "127.0.0.1"


class Resolver(AbstractResolver):
    """Gives each host its addresses, one after the other; the last one stays."""

    def __init__(self, *addresses: str):
        self._addresses = list(addresses)
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        address = self._addresses.pop(0) if len(self._addresses) > 1 else self._addresses[0]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)
        ]

    async def close(self) -> None:
        pass


async def _image(request: web.Request) -> web.Response:
    return web.Response(body=PIXELS, content_type="image/png")


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"0" * 65536)
    return response


async def _slow(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def _packed(request: web.Request) -> web.Response:
    return web.Response(body=PIXELS, headers={"Content-Encoding": "gzip"})


async def _redirect(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": request.query["to"]})


async def _circle(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "/circle"})


async def _huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(1 << 40)})
    await response.prepare(request)
    return response


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[int]:
    app = web.Application()
    for path, handler in (
        ("/a.png", _image), ("/endless", _endless), ("/slow", _slow), ("/packed", _packed),
        ("/to", _redirect), ("/circle", _circle), ("/huge", _huge),
    ):  # fmt: skip
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def fetched(path: str, *addresses: str, allows: Callable[[str], bool] | None = None) -> bytes:
    """What a server gives that images.test names, which has these addresses; all are allowed by default."""

    async def run() -> bytes:
        async with server() as port:
            listed = frozenset({f"images.test:{port}", f"mirror.test:{port}"})
            fetcher = ImageFetcher(listed, Resolver(*(addresses or (LOOPBACK,))), allows or (lambda _: True))
            return await fetcher.fetch(f"http://images.test:{port}{path}".replace("PORT", str(port)), "f")

    return asyncio.run(run())


def failure(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.param == "f"
    return caught.value


def test_a_listed_host_gives_the_file() -> None:
    assert fetched("/a.png") == PIXELS


def test_private_addresses_are_refused_where_the_connection_is_made() -> None:
    error = failure(lambda: fetched("/a.png", allows=is_public))
    assert "the address 127.0.0.1, which is not public" in str(error)
    # A host that has a public address when it is looked up first, and then another.
    error = failure(
        lambda: fetched("/to?to=/a.png", LOOPBACK, "10.0.0.1", allows=lambda address: address == LOOPBACK)
    )
    assert "10.0.0.1, which is not public" in str(error)


@pytest.mark.parametrize(
    "target", ["http://mirror.test:PORT/a.png", "/a.png", "//mirror.test:PORT/to?to=/a.png"]
)
def test_redirects_to_listed_hosts_are_followed(target: str) -> None:
    assert fetched(f"/to?to={target}") == PIXELS


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://other.test:PORT/a.png", "is at other.test:"),
        ("http://127.0.0.1:PORT/a.png", r"is at 127\.0\.0\.1:"),
        ("http://images.test:1/a.png", "is at images.test:1"),
        ("file:///etc/passwd", "no URL that can be fetched"),
    ],
)
def test_other_redirects_are_refused(target: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        fetched(f"/to?to={target}")


def test_a_circle_of_redirects_ends() -> None:
    assert "more than 3 redirects" in str(failure(lambda: fetched("/circle")))


def test_sizes_and_times_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(fetcher_module, "_DEADLINE_S", 60.0)
    for path in ("/endless", "/huge"):
        error = failure(lambda path=path: fetched(path))
        assert error.status == 413 and "more than 1048576 bytes" in str(error)
    assert "compressed" in str(failure(lambda: fetched("/packed")))
    assert "status 404" in str(failure(lambda: fetched("/none")))
    monkeypatch.setattr(fetcher_module, "_DEADLINE_S", 0.3)
    assert "more than 0.3 s" in str(failure(lambda: fetched("/slow")))


def test_few_files_are_fetched_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "_MAX_PARALLEL", 1)
    monkeypatch.setattr(fetcher_module, "_QUEUE_S", 0.2)
    monkeypatch.setattr(fetcher_module, "_DEADLINE_S", 0.6)

    async def run() -> list[bytes | BaseException]:
        async with server() as port:
            fetcher = ImageFetcher(
                frozenset({f"images.test:{port}"}), Resolver(LOOPBACK, LOOPBACK), lambda _: True
            )
            urls = [f"http://images.test:{port}/{name}" for name in ("slow", "a.png")]
            found = await asyncio.gather(*(fetcher.fetch(url, "f") for url in urls), return_exceptions=True)
            monkeypatch.undo()
            return [*found, await fetcher.fetch(urls[1], "f")]

    slow, late, last = asyncio.run(run())
    assert "more than 0.6 s" in str(slow) and isinstance(late, OverloadedError) and last == PIXELS


def test_a_host_without_a_server_is_an_error_of_the_request() -> None:
    async def run() -> None:
        with kept_port() as port:
            fetcher = ImageFetcher(frozenset({f"images.test:{port}"}), Resolver(LOOPBACK), lambda _: True)
            await fetcher.fetch(f"http://images.test:{port}/", "f")

    assert "no connection to its host" in str(failure(lambda: asyncio.run(run())))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0",
     "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1", "localhost", ""],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, ("93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8")))


@pytest.mark.parametrize(
    "url",
    ["https://images.example.org/a.png", "http://IMAGES.example.org:80/a?b#c", "https://cdn.test:8443/x",
     "http://[2606:2800:220:1::1]/a"],
)  # fmt: skip
def test_urls_of_listed_hosts(url: str) -> None:
    check_url(url, frozenset({"images.example.org", "cdn.test:8443", "[2606:2800:220:1::1]"}), "f")


@pytest.mark.parametrize(
    "url",
    ["https://images.example.org.evil.test/a", "https://evil.test/images.example.org", "ftp://images.example.org/a",
     "https://images.example.org:8443/a", "https://user:pw@images.example.org/a", "https://images.example.org@evil.test/",
     "https:///a", "http://images.example.org./a", "file:///a", "https://", "http://[::1", "https://images.example.org:99999/"],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    assert failure(lambda: check_url(url, frozenset({"images.example.org"}), "f")).status == 400
