"""Which versions of SGLang the plugin runs in."""

from atom.plugin.host_versions import HostVersions

VERSIONS = HostVersions("SGLang", (0, 5, 23), (0, 5, 23), "ATOM_DISABLE_SGLANG_PLUGIN")
misfit = VERSIONS.misfit
