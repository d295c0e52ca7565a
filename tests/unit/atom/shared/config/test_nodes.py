"""A node's place: settings, what launchers set, addresses, ports, endpoints."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import zmq

from atom.shared.config.cli import CommandLineParser, add_engine_args, add_nodes_args, with_launcher
from atom.shared.config.fields import ConfigError
from atom.shared.config.launchers import launcher_settings
from atom.shared.config.nodes import NodesConfig, first_device
from atom.shared.config.parallel import ParallelConfig
from atom.shared.utils.endpoint import bind, connect, endpoint_key, tcp_endpoint
from atom.shared.utils.interfaces import find_address, interface_of, local_addresses
from atom.shared.utils.logger import get_logger
from atom.shared.utils.net import ListenPort
from atom.supervisor.node_placement import NodePlacement, find_node_placement
from atom.supervisor.placement import NodePorts, Placement
from tests.helpers.servers.domains import zmq_context

LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "s-0.s.default"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "a[07-8]",
}
DP = {
    "ATOM_DP_SIZE": "2",
    "ATOM_DP_RANK": "1",
    "ATOM_DP_MASTER_IP": "10.0.0.1",
    "ATOM_DP_MASTER_PORT": "30000",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (LWS, {"nnodes": 2, "node_rank": 1, "master_addr": "s-0.s.default"}),
        (LWS | {"LWS_GROUP_SIZE": "1"}, {}),
        (
            TORCHRUN,
            {"nnodes": 4, "node_rank": 3, "local_rank": 1, "master_addr": "10.0.0.1", "master_port": 7},
        ),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            {"nnodes": 4, "node_rank": 3, "local_rank": 1, "master_addr": "10.0.0.1", "master_port": 8},
        ),
        (TORCHRUN | {"MASTER_ADDR": ""}, {}),
        (SLURM, {"nnodes": 2, "node_rank": 1, "local_rank": 0, "master_addr": "a07"}),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, {}),
        (
            DP,
            {
                "nnodes": 2,
                "data_parallel_size": 2,
                "node_rank": 1,
                "master_addr": "10.0.0.1",
                "master_port": 30000,
            },
        ),
        ({"ATOM_DP_SIZE": "1", "ATOM_DP_RANK": "0"}, {}),
        (LWS | {"ATOM_DP_SIZE": "2", "ATOM_DP_MASTER_IP": "s-0.s.default"}, {"data_parallel_size": 2}),
    ],
)
def test_what_launchers_set(environ: dict[str, str], expected: dict[str, Any]) -> None:
    found = launcher_settings(environ, set())
    assert expected.items() <= found.items() and (expected or not found)


def test_flags_win_and_launchers_must_agree() -> None:
    both = LWS | SLURM
    with pytest.raises(
        ConfigError, match="LWS_LEADER_ADDRESS says --master-addr s-0.s.default, SLURM_STEP_NODE"
    ):
        launcher_settings(both, set())
    assert launcher_settings(both, {"master_addr"}) == {"nnodes": 2, "node_rank": 1, "local_rank": 0}
    with pytest.raises(ConfigError, match="RANK='x' is not a whole number"):
        launcher_settings(TORCHRUN | {"RANK": "x"}, set())


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("gpu[007-012,15],login1", "gpu007"), ("a1,b[1-2]", "a1"), ("n[3]-x,n4", "n3-x"), ("solo", "solo")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, expected: str) -> None:
    assert launcher_settings(SLURM | {"SLURM_STEP_NODELIST": nodes}, set())["master_addr"] == expected


def test_settings_that_contradict_one_another() -> None:
    with pytest.raises(ConfigError, match="--node-rank 2"):
        NodesConfig(node_rank=2, master_addr="a").check(2)
    with pytest.raises(ConfigError, match="--nnodes 2 needs --master-addr"):
        NodesConfig().check(2)
    NodesConfig().check(1)


def test_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("of this test, long enough\n")
    assert NodesConfig(cluster_secret_file=str(path)).secret() == b"of this test, long enough"
    with pytest.raises(ConfigError, match="several nodes need --cluster-secret-file"):
        NodesConfig().secret()
    with pytest.raises(ConfigError, match="use one of --cluster-secret-file or"):
        NodesConfig(cluster_secret="x" * 16, cluster_secret_file=str(path)).secret()
    with pytest.raises(ConfigError, match="the cluster secret has 5 characters"):
        NodesConfig(cluster_secret="short").secret()
    with pytest.raises(ConfigError, match="--cluster-secret-file /no/such: No such file"):
        NodesConfig(cluster_secret_file="/no/such").secret()


def test_gpus_of_nodes_that_share_a_host() -> None:
    assert [first_device(0, 2, 8), first_device(3, 2, 8), first_device(3, 2, 2)] == [0, 6, 0]
    with pytest.raises(ConfigError, match="--local-rank 2 with 2 workers needs 6 GPUs, not 4"):
        first_device(2, 2, 4)


def test_addresses_and_interfaces() -> None:
    assert local_addresses()["127.0.0.1"] == "lo" == interface_of("127.3.2.1")
    assert find_address("lo") == "127.0.0.1" and find_address("127.9.9.9") == "127.9.9.9"
    assert interface_of("192.0.2.1") is None
    with pytest.raises(ValueError, match="no interface or IPv4 address eth99; it has .*lo 127.0.0.1"):
        find_address("eth99")


def test_a_place_is_found_or_refused() -> None:
    config = NodesConfig(1, "127.77.1.1", 29999, "127.77.1.2", cluster_secret="x" * 20)
    node = find_node_placement(config)
    assert (node.address, node.interface, node.master) == ("127.77.1.2", "lo", "127.77.1.1:29999")
    assert node.link is None and node.endpoint().endswith("@127.77.1.1:29999")
    with pytest.raises(ConfigError, match="is 192.0.2.1, which this node, the master, has not"):
        find_node_placement(NodesConfig(0, "192.0.2.1", cluster_secret="x" * 20))
    for local in ("eth99", "::1", "0.0.0.0"):
        with pytest.raises(ConfigError, match="--local-addr: this host has no interface"):
            find_node_placement(NodesConfig(1, "127.77.1.1", local_addr=local, cluster_secret="x" * 20))
    with pytest.raises(ConfigError, match="--master-addr no-such-host.invalid: no IPv4 address after"):
        find_node_placement(NodesConfig(1, "no-such-host.invalid", join_timeout=0.1, cluster_secret="x" * 20))


def test_the_wait_for_the_name_of_the_master_can_be_given_up() -> None:
    def give_up() -> None:
        raise SystemExit(5)

    with pytest.raises(SystemExit):
        find_node_placement(NodesConfig(1, "no-such-host.invalid", cluster_secret="x" * 20), give_up)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("::1", "an IPv6 address"),
        ("[fe80::1%eth0]", "an IPv6 address"),
        ("0.0.0.0", "not the address of one"),
    ],
)
def test_an_address_that_no_node_0_can_have_is_refused_at_once(rank: int, address: str, what: str) -> None:
    config = NodesConfig(rank, address, local_addr="127.77.1.5", cluster_secret="x" * 20)
    with pytest.raises(ConfigError, match=f"--master-addr {re.escape(address)} is {what}"):
        find_node_placement(config)


def test_the_master_needs_its_own_address_whatever_its_local_one() -> None:
    config = NodesConfig(0, "192.0.2.1", local_addr="127.77.1.5", cluster_secret="x" * 20)
    with pytest.raises(ConfigError, match="is 192.0.2.1, which this node, the master, has not"):
        find_node_placement(config)


@pytest.mark.parametrize(("mode", "warnings"), [(0o644, 1), (0o640, 0)])
def test_a_secret_that_all_users_can_read_is_noted(
    tmp_path: Path, mode: int, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = tmp_path / "secret", []
    path.write_text("x" * 20)
    path.chmod(mode)
    monkeypatch.setattr(get_logger(), "warning", lambda text, *values: lines.append(text % values))
    find_node_placement(NodesConfig(1, "127.77.1.1", local_addr="127.77.1.5", cluster_secret_file=str(path)))
    assert (
        lines == [f"--cluster-secret-file {path}: all users of this host can read it: chmod 600"] * warnings
    )


def test_one_node_given_by_flag_has_no_place_among_others() -> None:
    def settings(*args: str) -> argparse.Namespace:
        parser = CommandLineParser()
        add_engine_args(parser)
        add_nodes_args(parser)
        return with_launcher(parser.parse_args(["--model", "m", *args]), TORCHRUN)

    alone, one_of_four = settings("--nnodes", "1"), settings()
    assert (alone.nnodes, alone.node_rank, alone.master_addr) == (1, 0, None)
    assert (one_of_four.nnodes, one_of_four.node_rank, one_of_four.master_addr) == (4, 3, "10.0.0.1")
    with pytest.raises(ConfigError, match="MASTER_PORT=65535: 65536 is no TCP port"):
        launcher_settings(TORCHRUN | {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}, set())


def test_engines_of_their_own_need_one_port_each() -> None:
    placement = Placement(ParallelConfig(data_parallel_size=4, nnodes=2))
    assert [placement.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert placement.ports(0) == {} and placement.ports(1) == {"core-2": True, "core-3": True}
    everywhere = Placement(ParallelConfig(data_parallel_size=4, nnodes=2), frontend_per_node=True)
    assert everywhere.ports(0) == {"core-0": True, "core-1": True}
    assert placement.device_of(3, 0) == 1


def test_an_engine_over_two_nodes_needs_ports_for_its_workers() -> None:
    placement = Placement(ParallelConfig(tensor_parallel_size=4, nnodes=2))
    assert [placement.node_of(0, worker) for worker in range(4)] == [0, 0, 1, 1]
    assert placement.nodes_of(range(1)) == {0, 1}
    assert placement.ports(0) == {"store-0": True, "workers-0": True} and placement.ports(1) == {}


def test_engines_in_lockstep_need_ports_for_waves() -> None:
    parallel = ParallelConfig(2, data_parallel_size=2, enable_expert_parallel=True, nnodes=2)
    placement = Placement(parallel)
    assert placement.groups == [range(2)] and placement.nodes_of(range(2)) == {0, 1}
    assert placement.ports(0) == {"store-0": True, "wave-0": True, "wave-1": True}
    assert placement.ports(1) == {"core-1": True, "wave-2": True, "wave-3": True}


def test_on_one_node_only_stores_are_ports_and_on_the_loopback_interface() -> None:
    placement = Placement(ParallelConfig(2, data_parallel_size=2))
    assert placement.ports(0) == {"store-0": False, "store-1": False}
    ports = NodePorts(placement, 0, "10.0.0.1")
    assert {port.address for port in ports.ports.values()} == {"127.0.0.1"}
    ports.close()


def test_ports_are_consecutive_from_the_given_one() -> None:
    placement = Placement(ParallelConfig(data_parallel_size=4, nnodes=2))
    ports = NodePorts(placement, 1, "127.77.1.3", 28100)
    assert [(port.address, port.port) for port in ports.ports.values()] == [
        ("127.77.1.3", 28100),
        ("127.77.1.3", 28101),
    ]
    with pytest.raises(OSError, match="port 28100: it is in use; choose another --port"):
        NodePorts(placement, 1, "127.77.1.3", 28100)
    ports.close()


def test_an_endpoint_with_another_key_gets_nothing() -> None:
    with zmq_context() as context, ListenPort("127.77.1.4", 0) as port:
        life_0, life_1 = (endpoint_key(b"secret", f"core-0 {life}") for life in (0, 1))
        server, former, client = (
            context.socket(zmq.ROUTER),
            context.socket(zmq.DEALER),
            context.socket(zmq.DEALER),
        )
        listener = port.open(0).detach()
        bind(server, tcp_endpoint(life_1, "127.77.1.4", port.port, listener))
        connect(former, tcp_endpoint(life_0, "127.77.1.4", port.port))
        connect(client, tcp_endpoint(life_1, "127.77.1.4", port.port))
        former.send(b"late")
        client.send(b"hello")
        assert server.poll(60_000) and server.recv_multipart()[1] == b"hello"
        assert not server.poll(300)


def test_the_only_node_has_no_master() -> None:
    assert NodePlacement().secret == b"" and NodePlacement().link is None
