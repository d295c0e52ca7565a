"""The place of this node, from what a launcher sets: LeaderWorkerSet, torchrun, Slurm, or ATOM_DP_* by hand.

A launcher starts `atom-launch` once for each node. Flags, their variables and the file of --config have
precedence; two launchers that say different things are an error.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from atom.shared.config.fields import ConfigError
from atom.shared.utils.envs import VARIABLES

__all__ = ["launcher_settings"]


class _Given(NamedTuple):
    value: int | str
    variable: str


def launcher_settings(environ: Mapping[str, str], given: set[str]) -> dict[str, Any]:
    """Values by field name, without those `given` otherwise; empty without a launcher, or for one node.

    Raises ConfigError with the variable.
    """
    found: dict[str, _Given] = {}
    for launcher in (_data_parallel, _leader_worker_set, _torchrun, _slurm):
        for name, (value, variable) in launcher(environ).items():
            if name in given:
                continue
            known = found.setdefault(name, _Given(value, variable))
            if known.value != value:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{known.variable} says {flag} {known.value}, {variable} says {value}: "
                    f"unset one of them, or give {flag}"
                )
    return {name: value for name, (value, _) in found.items()}


def _data_parallel(environ: Mapping[str, str]) -> dict[str, _Given]:
    """A node for each data-parallel rank."""
    if not environ.get("ATOM_DP_SIZE") or (size := _number(environ, "ATOM_DP_SIZE")) < 2:
        return {}
    found = {name: _Given(size, "ATOM_DP_SIZE") for name in ("nnodes", "data_parallel_size")}
    found |= _numbers(
        environ,
        node_rank="ATOM_DP_RANK",
        local_rank="ATOM_DP_RANK_LOCAL",
        master_port="ATOM_DP_MASTER_PORT",
    )
    default = VARIABLES["ATOM_DP_MASTER_IP"].default_value()
    address = environ.get("ATOM_DP_MASTER_IP") or str(default)
    return found | {"master_addr": _Given(address, "ATOM_DP_MASTER_IP")}


def _leader_worker_set(environ: Mapping[str, str]) -> dict[str, _Given]:
    """A node for each pod of a group."""
    if not environ.get("LWS_GROUP_SIZE") or _number(environ, "LWS_GROUP_SIZE") < 2:
        return {}
    found = _numbers(environ, nnodes="LWS_GROUP_SIZE", node_rank="LWS_WORKER_INDEX")
    if address := environ.get("LWS_LEADER_ADDRESS"):
        found["master_addr"] = _Given(address, "LWS_LEADER_ADDRESS")
    return found


def _torchrun(environ: Mapping[str, str]) -> dict[str, _Given]:
    """A node for each process: `--nproc-per-node 1`, or more where nodes share a host."""
    needed = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    if not all(environ.get(name) for name in needed) or _number(environ, "WORLD_SIZE") < 2:
        return {}
    found = _numbers(environ, nnodes="WORLD_SIZE", node_rank="RANK", local_rank="LOCAL_RANK")
    # torchrun's own store has the port that it passes on: the next one is ours.
    offset = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number(environ, "MASTER_PORT") + offset
    if not 0 < port < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT={environ['MASTER_PORT']}: {port} is no TCP port for the nodes to join at"
        )
    found["master_port"] = _Given(port, "MASTER_PORT")
    return found | {"master_addr": _Given(environ["MASTER_ADDR"], "MASTER_ADDR")}


def _slurm(environ: Mapping[str, str]) -> dict[str, _Given]:
    """A node for each task of an srun. These variables are not set in a batch script itself."""
    if not environ.get("SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return {}
    found = _numbers(
        environ, nnodes="SLURM_STEP_NUM_TASKS", node_rank="SLURM_PROCID", local_rank="SLURM_LOCALID"
    )
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        found["master_addr"] = _Given(_first_host(nodes), "SLURM_STEP_NODELIST")
    return found


def _first_host(nodes: str) -> str:
    """The first host of a list such as gpu[007-012,15],login1."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _numbers(environ: Mapping[str, str], **variables: str) -> dict[str, _Given]:
    return {
        name: _Given(_number(environ, variable), variable)
        for name, variable in variables.items()
        if environ.get(variable)
    }


def _number(environ: Mapping[str, str], variable: str) -> int:
    text = environ[variable]
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} is not a whole number from 0 up")
    return int(text)
