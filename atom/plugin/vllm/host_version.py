"""Which versions of vLLM the plugin runs in."""

from atom.plugin.host_versions import HostVersions

VERSIONS = HostVersions("vLLM", (0, 26), (0, 33), "ATOM_DISABLE_VLLM_PLUGIN")
misfit = VERSIONS.misfit
