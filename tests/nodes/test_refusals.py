"""Nodes that do not fit are refused in one line on both sides, and the right one joins afterwards."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.servers.nodes import ARGS, NodeProcess, Nodes, network_hosts, nodes_of

pytestmark = pytest.mark.timeout(600)

OTHER_VERSION = """
import atom.shared.utils.version as version
version.atom_version = lambda: "9.9.9"
"""


def errors(node: NodeProcess) -> list[str]:
    return [line.strip() for line in node.log if line.startswith("error:") or " E launch]" in line]


def refused(nodes: Nodes, *more: str, status: int = 1, **variables: str) -> str:
    """The one error of a second node with these arguments."""
    node = nodes.start(1, *more, variables=variables)
    assert node.wait() == status
    (line,) = errors(node)
    return line.partition("cannot join: ")[2] or line


def test_a_node_that_does_not_fit_is_refused(model: str, tmp_path: Path) -> None:
    fewer_layers = Path(shutil.copytree(model, tmp_path / "fewer"))
    settings = json.loads((fewer_layers / "config.json").read_text())
    (fewer_layers / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    other_weights = Path(shutil.copytree(model, tmp_path / "other"))
    with (other_weights / "model.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(bytes(8))
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(OTHER_VERSION)
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", "2") as nodes:
        master = nodes.start(0)
        assert refused(nodes, "--max-num-seqs", "7") == "--max-num-seqs: node 1 has 7, the master has 256"
        assert refused(nodes, "--dtype", "bfloat16") == "--dtype: node 1 has bfloat16, the master has float32"
        text = refused(nodes, ATOM_ALL2ALL_PADDED_TOKENS="99")
        assert text.startswith("ATOM_ALL2ALL_PADDED_TOKENS: node 1 has 99, the master has ")
        text = refused(nodes, "--load-dummy")
        assert text == "--load-dummy: node 1 has True, the master has False"
        text = refused(nodes, "--model", str(fewer_layers))
        assert text == "config.json's num_hidden_layers: node 1 has 3, the master has 4"
        text = refused(nodes, "--model", str(other_weights))
        assert text.startswith("model.safetensors: node 1 has ")
        path = ":".join([str(patched), *sys.path])
        assert refused(nodes, PYTHONPATH=path).startswith("ATOM: node 1 has 9.9.9, the master has ")
        text = refused(nodes, "--join-timeout", "3", ATOM_CLUSTER_SECRET="another secret of these tests")
        assert (
            "waited 3 s for the master at 10.213.7.1:29500: it refuses the connection: is the cluster" in text
        )
        text = refused(nodes, "--master-port", "29501", "--join-timeout", "3")
        assert "nothing listens there, or a firewall is between" in text
        assert "several nodes need --cluster-secret-file" in refused(nodes, status=2, ATOM_CLUSTER_SECRET="")
        assert len(errors(master)) == 7
        node = nodes.start(1)
        master.until("ready .*http")
        second = nodes.start(1, "--join-timeout", "3")
        assert second.wait() == 1 and "node 1 has joined already, from 10.213.7.2" in second.text()
        assert [master.terminate(), node.wait()] == [0, 0]


def test_a_master_that_waits_in_vain_ends_in_one_line(model: str) -> None:
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", "2") as nodes:
        master = nodes.start(0, "--join-timeout", "2")
        assert master.wait() == 1
        assert "error: waited 2 s for node 1 to join at 10.213.7.1:29500" in master.text()
