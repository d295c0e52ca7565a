"""deploy/ without its tools: flags, variables, metrics and probes are those of the server."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from atom.shared.config.cli import all_fields
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import CoreStats, HeapUse, KVTierStats
from atom.shared.utils import envs
from frontend.metrics.exposition import Snapshot, expose
from frontend.metrics.metrics import EngineMetrics, Metrics
from tests.helpers.source import ROOT

DEPLOY = ROOT / "deploy"
VARIABLES = {f"ATOM_{field.name.upper()}" for field in all_fields()} | envs.VARIABLES.keys()
METRIC = re.compile(r"\b(?:atom|vllm):\w+")
STOP_S = 20.0
"""What the end of a server takes beyond --shutdown-timeout; docs/operate/operations.md."""


def exposed() -> set[str]:
    """The names of the samples of a scrape."""
    needed = [field.name for field in msgspec.structs.fields(CoreStats) if field.required]
    optional = {"num_accepted_tokens_per_pos": [1], "expert_imbalance": [1.0]}
    tiers = [KVTierStats("CPU", 1, 1, 1, 1, 1, 1)]
    stats = CoreStats(**dict.fromkeys(needed, 1), **optional, kv_tiers=tiers, worker_heaps=[HeapUse(1, 1)])
    metrics = Metrics()
    metrics.engines[0] = EngineMetrics()
    metrics.responses[200] += 1
    text = expose(
        Snapshot("tiny", metrics, {0: stats}, {0: True}, {0: 0}, live=1, block_size=16, forced_length=2.0)
    ).decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_every_metric_of_the_dashboard_exists() -> None:
    board = json.loads((DEPLOY / "monitoring/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(expressions) > 20 and all(METRIC.search(one) for one in expressions)
    assert {name for one in expressions for name in METRIC.findall(one)} <= exposed()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_of_the_alerts_exists() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in METRIC.findall(rule["expr"])}
    assert named and named <= exposed()
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in rules)


def test_every_metric_of_the_pages_exists() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *DEPLOY.rglob("*.md")]
    named = {name for page in pages for name in re.findall(rf"`({METRIC.pattern})`", page.read_text())}
    assert len(named) > 20
    assert named - exposed() == {"vllm:lora_requests_info"}, "the pages say of this one that it is missing"


def manifests() -> list[Path]:
    return sorted((DEPLOY / "kubernetes").rglob("*.yaml"))


@pytest.mark.parametrize("path", manifests(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_manifests_set_known_variables(path: Path) -> None:
    for one in yaml.safe_load_all(path.read_text()):
        for generator in one.get("configMapGenerator", []):
            names = {literal.partition("=")[0] for literal in generator["literals"]}
            assert names - {"HF_HOME"} <= VARIABLES


def servers() -> list[dict[str, Any]]:
    """The pods that serve HTTP."""
    base = yaml.safe_load((DEPLOY / "kubernetes/base/deployment.yaml").read_text())
    nodes = yaml.safe_load((DEPLOY / "kubernetes/overlays/multi-node/leaderworkerset.yaml").read_text())
    return [
        base["spec"]["template"]["spec"],
        nodes["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"],
    ]


@pytest.mark.parametrize("pod", servers(), ids=["base", "multi-node"])
def test_probes_and_times(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert patience["startup"] >= 3600 and patience["liveness"] > ReliabilityConfig().hang_timeout
    assert patience["readiness"] <= 5
    sleep = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep + ServerConfig().shutdown_timeout + STOP_S
    assert pod["enableServiceLinks"] is False


def test_the_images_hold_every_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests", "tools"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    files = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
    assert len(files) == 3
    for file in files:
        lines = [shlex.split(line) for line in file.read_text().splitlines() if line.startswith("COPY ")]
        copied = {word for line in lines for word in line[1:-1]}
        assert packages <= copied and {f"!{name}" for name in copied} <= set(ignored), file.name
