"""Starts, monitors, restarts and stops the processes of a server. It handles neither models nor HTTP.

All processes are direct children of the supervisor, so that it detects the death of each one. Processes
that need one another are a failure domain: they start, end and restart together. A life is one restart
generation of a domain; lives are numbered from 0.

    supervisor ─┬─ prepare                     ends once the checkpoint is plain files
                ├─ engine 0 ─┬─ core           one engine for each data-parallel rank:
                │            └─ worker 0 … tp-1    a failure domain
                ├─ engine 1 …                  engines that share experts are one domain
                ├─ frontend 0                  each a failure domain; none under the library
                └─ frontend 1 …

Each life has a directory for its sockets:

    atom-run-XXXXXXXX/control                  for the frontends: which engines there are
    atom-run-XXXXXXXX/engine-1.3/              rank 1, life 3: core, workers, supervisor
    atom-run-XXXXXXXX/frontend-0.0/            supervisor
"""

from atom.supervisor.failure import StartError
from atom.supervisor.node_agent import NodeAgent
from atom.supervisor.node_placement import NodePlacement, find_node_placement
from atom.supervisor.placement import NodePorts, Placement
from atom.supervisor.prepare import Prepared, prepared
from atom.supervisor.supervisor import Supervisor

__all__ = [
    "NodeAgent",
    "NodePlacement",
    "NodePorts",
    "Placement",
    "Prepared",
    "StartError",
    "Supervisor",
    "find_node_placement",
    "prepared",
]
