"""ATOM as an out-of-tree plugin of vLLM: its platform, its models, its attention.

registration     the entry points, which vLLM calls in each of its processes; imports vLLM only when called
host_version     which versions of vLLM fit
platform         the machine's own platform, with ATOM's attention backend
host_config      vLLM's configuration as a checkpoint and the context that layers are built in
model            the model class that vLLM makes
step_context     vLLM's metadata of a step as the forward context of ATOM's layers
host_attention   attention by vLLM's own layers
own_attention    attention by ATOM: layers that vLLM gives a KV cache, and the attention backend CUSTOM
kv_layout        the layout of that cache, as each version of vLLM wants it said
"""
