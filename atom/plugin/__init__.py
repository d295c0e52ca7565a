"""ATOM's models and kernels inside other engines' processes, as their plugin.

families         the families that have run inside a host
host_versions    which versions of a host fit
host_checkpoint  a host's configuration as a checkpoint
host_group       a host's tensor-parallel group
hosted_model     a family's model with a host's weights
vllm, sglang     what is different between the hosts
"""
