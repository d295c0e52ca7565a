"""Strangers at every port that is open between nodes: garbage, floods, wrong keys, half-open connections."""

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from atom.shared.utils.endpoint import connect, tcp_endpoint
from tests.helpers.servers.node_requests import ids_of, some_requests, until_up
from tests.helpers.servers.nodes import ARGS, Host, NodeProcess, inside, network_hosts, nodes_of

pytestmark = pytest.mark.timeout(900)

ATTEMPTS = 10_000
HALF_OPEN = 500
KEYS = 200
MEMORY_GROWTH = 64 << 20
MOST_LINES = 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"  # of ZMTP 3.1
_LISTEN = "0A"


def listening(node: NodeProcess, host: Host) -> list[tuple[int, str]]:
    """Each TCP port that the node's processes have open on the address of its host, and the command line."""
    owners = {}
    for pid, line in {node.process.pid: "launch", **node.children()}.items():
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                owners[os.readlink(f"/proc/{pid}/fd/{name}")] = line
            except OSError:
                continue
    with open(f"/proc/{node.process.pid}/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    address = struct.pack("<I", *struct.unpack(">I", socket.inet_aton(host.address))).hex().upper()
    return [
        (int(row[1].partition(":")[2], 16), owners.get(f"socket:[{row[9]}]", ""))
        for row in rows
        if row[3] == _LISTEN and row[1].partition(":")[0] in (address, "00000000")
    ]


def messages(chooser: random.Random) -> Iterator[bytes]:
    """What strangers send: nothing, noise, other protocols, the beginning of ours."""
    while True:
        yield b""
        yield chooser.randbytes(chooser.randint(1, 400))
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        yield GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + chooser.randbytes(60)
        yield GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + chooser.randbytes(194)
        yield GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8


def attack(host: Host, ports: list[int]) -> int:
    """All attempts, spread over the ports, while half-open connections stay; returns how many connected."""
    chooser, connected, open_ones = random.Random(7), 0, []
    for port in ports:
        for _ in range(HALF_OPEN // len(ports)):
            stranger = socket.create_connection((host.address, port), timeout=5)
            stranger.send(GREETING[: chooser.randint(0, len(GREETING))])
            open_ones.append(stranger)
    for number, message in zip(range(ATTEMPTS), messages(chooser), strict=False):
        try:
            with socket.create_connection((host.address, ports[number % len(ports)]), timeout=5) as stranger:
                connected += 1
                stranger.sendall(message)
                if number % 3 == 0:  # with a reset instead of a FIN
                    linger = struct.pack("ii", 1, 0)
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError:
            continue
    with zmq.Context() as context:
        for number in range(KEYS):
            with context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                key = chooser.randbytes(32).hex()
                connect(stranger, tcp_endpoint(key, host.address, ports[number % len(ports)]))
                stranger.send(b"let me in")
                time.sleep(0.02)
    for stranger in open_ones:
        stranger.close()
    return connected


def memory(node: NodeProcess) -> dict[int, int]:
    """Memory of each process in bytes, without workers, which keep kernels of every size of step."""
    pids = [pid for pid, line in node.children().items() if "workers.main" not in line]
    return {pid: psutil.Process(pid).memory_info().rss for pid in [node.process.pid, *pids]}


@pytest.mark.parametrize("layout", [("-dp", "2"), ("-dp", "2", "--enable-expert-parallel")], ids=" ".join)
def test_strangers_change_nothing(model: str, moe_model: str, layout: tuple[str, ...]) -> None:
    served, requests = (moe_model if len(layout) > 2 else model), some_requests(40)

    async def serve_while(attacks: "asyncio.Future[list[int]]", url: str, expected: list[list[int]]) -> int:
        rounds = 0
        while not attacks.done():
            assert await ids_of(url, requests) == expected
            rounds += 1
        return rounds

    async def drive(master: NodeProcess, node: NodeProcess) -> None:
        await until_up(master.url, 2)
        expected = await ids_of(master.url, requests)
        places = [(hosts[0], master), (hosts[1], node)]
        before = [(list(each.children()), memory(each), len(each.log)) for _, each in places]
        http = int(master.url.rpartition(":")[2])
        found = [[row for row in listening(each, host) if row[0] != http] for host, each in places]
        for (host, _), rows in zip(places, found, strict=True):
            for port, owner in rows:
                print(f"{host.address}:{port} {owner.rpartition('-m ')[2]}")
        assert all(found), "both hosts listen"
        begun = time.monotonic()
        ports = [[port for port, _ in rows] for rows in found]
        attacks = asyncio.gather(
            asyncio.to_thread(inside, hosts[1], lambda: attack(hosts[0], ports[0])),
            asyncio.to_thread(inside, hosts[0], lambda: attack(hosts[1], ports[1])),
        )
        rounds = await serve_while(attacks, master.url, expected)
        print(
            f"{sum(await attacks)} connections, {rounds * len(requests)} requests meanwhile, ids equal",
            end=" ",
        )
        print(f"in {time.monotonic() - begun:.0f} s")
        for (children, rss, lines), (_, each) in zip(before, places, strict=True):
            assert list(each.children()) == children
            grown = {pid: now - rss[pid] for pid, now in memory(each).items()}
            print(
                f"grown by {[f'{size >> 20} MiB' for size in grown.values()]}, {len(each.log) - lines} lines"
            )
            assert max(grown.values()) < MEMORY_GROWTH
            assert len(each.log) - lines < 20
        assert await ids_of(master.url, requests) == expected

    with network_hosts(2) as hosts, nodes_of(hosts, "--model", served, *ARGS, *layout) as nodes:
        master, node = nodes.start_all()
        inside(hosts[0], lambda: asyncio.run(drive(master, node)))
        assert [master.terminate(), node.wait()] == [0, 0]
