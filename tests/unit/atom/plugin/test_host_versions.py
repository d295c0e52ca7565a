"""Only versions of a host whose interfaces are known get ATOM's models."""

import pytest

from atom.plugin.host_versions import HostVersions

VERSIONS = HostVersions("SGLang", (0, 5, 23), (0, 5, 23), "ATOM_DISABLE_SGLANG_PLUGIN")


@pytest.mark.parametrize("host", ["0.5.23", "0.5.23+cpu", "0.5.23.post1", "0.5.23rc2"])
def test_known_versions_fit(host: str) -> None:
    assert VERSIONS.misfit(host) is None


@pytest.mark.parametrize("host", ["0.5.22", "0.5.24", "0.5", "1.0.0", "dev", ""])
def test_another_version_is_named_with_ours_in_one_line(host: str) -> None:
    problem = VERSIONS.misfit(host)
    assert problem is not None and "\n" not in problem
    assert problem.startswith("ATOM 0.") and f"plugin of SGLang 0.5.23; SGLang {host} runs" in problem
