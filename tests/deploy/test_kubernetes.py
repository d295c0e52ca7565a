"""deploy/kubernetes: overlays render, and fit the schemas of Kubernetes and of LeaderWorkerSet."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom.engine.launcher import END_S
from tests.helpers.source import ROOT

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
VERSION = "1.33"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def rendered(overlay: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pod templates."""
    found = []
    for one in objects:
        if one["kind"] == "Deployment":
            found.append(one["spec"]["template"])
        if one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]
            found += [template["leaderTemplate"], template["workerTemplate"]]
    return found


def problems(paths: list[Path]) -> str:
    """What kubernetes-validate says; empty if it accepts all."""
    done = subprocess.run(
        ["kubernetes-validate", "--strict", "--kubernetes-version", VERSION, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.skipif(
    shutil.which("kubernetes-validate") is None, reason="kubernetes-validate is not installed"
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_fit_their_schemas(overlay: str, tmp_path: Path) -> None:
    objects, paths = rendered(overlay), []
    known = [one for one in objects if one["kind"] != "LeaderWorkerSet"]
    known += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": p["spec"]}
        for p in pods(objects)
    ]
    for index, one in enumerate(known):
        paths.append(tmp_path / f"{index}.yaml")
        paths[-1].write_text(yaml.safe_dump(one))
    assert problems(paths) == ""
    for one in objects:
        if one["kind"] == "LeaderWorkerSet":
            instance = tmp_path / "set.json"
            instance.write_text(json.dumps(one))
            schema = FOLDER / "schemas/leaderworkerset.json"
            done = subprocess.run(
                ["check-jsonschema", "--schemafile", str(schema), str(instance)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    shutil.which("kubernetes-validate") is None, reason="kubernetes-validate is not installed"
)
def test_a_misspelled_field_is_found(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("{apiVersion: v1, kind: Service, metadata: {name: llm}, spec: {port: 80}}")
    assert "port" in problems([path])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_references_and_selectors_meet(overlay: str) -> None:
    objects = rendered(overlay)
    maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    [service] = [one for one in objects if one["kind"] == "Service"]
    for pod in pods(objects):
        [container] = pod["spec"]["containers"]
        named = {
            source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source
        }
        assert named == maps
        used = {
            v["persistentVolumeClaim"]["claimName"]
            for v in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in v
        }
        assert used <= claims
        serves = bool(container.get("ports"))
        matches = service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert serves == matches, "the service reaches exactly the pods that serve HTTP"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rolling_update_drains_and_leaves_no_gap(overlay: str) -> None:
    """The new pods are ready first; the old ones have time for all that their end may take."""
    objects = rendered(overlay)
    [server] = [one for one in objects if one["kind"] in ("Deployment", "LeaderWorkerSet")]
    spec = server["spec"]
    if server["kind"] == "Deployment":
        rolling = spec["strategy"]["rollingUpdate"]
    else:
        rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
    [data] = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    for pod in pods(objects):
        [container] = pod["spec"]["containers"]
        pause_s = 0
        if container.get("ports"):  # balancers hear of its end before it begins
            command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            pause_s = int(seconds)
            assert command == "sleep" and pause_s > 0
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        drain_s = int(data["ATOM_SHUTDOWN_TIMEOUT"]) + END_S
        assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + drain_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gpus_and_images_belong_together(overlay: str) -> None:
    resource = "amd.com/gpu" if overlay.endswith("-amd") else "nvidia.com/gpu"
    tag = {"amd.com/gpu": "rocm", "nvidia.com/gpu": "cuda"}[resource] if overlay != "cpu" else "cpu"
    [data] = [one["data"] for one in rendered(overlay) if one["kind"] == "ConfigMap"]
    wanted = int(data.get("ATOM_TENSOR_PARALLEL_SIZE", 1)) * int(data.get("ATOM_DATA_PARALLEL_SIZE", 1))
    found = pods(rendered(overlay))
    for pod in found:
        [container] = pod["spec"]["containers"]
        assert container["image"] == f"atom-serve:{tag}"
        gpus = {
            name: value for name, value in container["resources"]["limits"].items() if name.endswith("/gpu")
        }
        assert gpus == ({} if overlay == "cpu" else {resource: wanted // len(found)})
