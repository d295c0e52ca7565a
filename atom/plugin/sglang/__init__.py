"""ATOM as a plugin of SGLang: its models and its attention, in SGLang's server, scheduler and radix cache.

registration       the entry point, which SGLang calls in each process; imports SGLang only when called
host_version       which versions of SGLang fit
host_config        SGLang's configuration as a checkpoint and the context that layers are built in
models             the external model package: a class for each architecture
model              the model class that SGLang makes
radix_layers       SGLang's RadixAttention as the caches of ATOM's layers
kv_pool            SGLang's KV pools in the layout of ATOM's ops
step_plan          SGLang's batch of a step as the attention plan of ATOM's ops
attention_backend  SGLang's attention backends `atom` and `aiter`
"""
