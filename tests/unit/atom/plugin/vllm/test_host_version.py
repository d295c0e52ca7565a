"""Only versions of vLLM whose interfaces are known get ATOM's models."""

import pytest

from atom.plugin.vllm.host_version import misfit


@pytest.mark.parametrize("host", ["0.26.0", "0.32.0+cpu", "0.33.1rc2"])
def test_known_versions_fit(host: str) -> None:
    assert misfit(host) is None


@pytest.mark.parametrize("host", ["0.25.9", "0.34.0", "1.0", "dev", ""])
def test_another_version_is_named_with_ours_in_one_line(host: str) -> None:
    problem = misfit(host)
    assert problem is not None and "\n" not in problem
    assert problem.startswith("ATOM 0.") and f"vLLM {host} runs without it" in problem
