"""A class for each architecture that ATOM runs in SGLang, which finds models by names of classes."""

from atom.plugin.families import SGLANG
from atom.plugin.sglang.model import AtomForCausalLM
from atom.shared.utils import envs

EntryClass = [
    type(name, (AtomForCausalLM,), {"__module__": __name__, "__doc__": AtomForCausalLM.__doc__})
    for name in sorted(set(SGLANG.replaced(not envs.ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION)))
]
