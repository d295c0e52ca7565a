"""Pairs of arguments of MORI's functions that a call must not confuse: each swap makes a test fail."""

_OP = "mori.ops.EpDispatchCombineOp"
_CONFIG = "mori.ops.EpDispatchCombineConfig"

SWAPS = [
    (_CONFIG, "rank", "world_size"),
    (_CONFIG, "hidden_dim", "max_num_inp_token_per_rank"),
    (_CONFIG, "num_experts_per_rank", "num_experts_per_token"),
    (_CONFIG, "warp_num_per_block", "block_num"),
    (_CONFIG, "block_num", "rdma_block_num"),
    (_CONFIG, "data_type", "max_token_type_size"),
    (_CONFIG, "scale_dim", "hidden_dim"),
    (_CONFIG, "kernel_type", "gpu_per_node"),
    (_CONFIG, "num_qp_per_pe", "scale_type_size"),
    (f"{_OP}.dispatch", "input", "weights"),
    (f"{_OP}.dispatch", "weights", "indices"),
    (f"{_OP}.dispatch", "scales", "weights"),
    (f"{_OP}.dispatch", "block_num", "warp_per_block"),
    (f"{_OP}.dispatch", "rdma_block_num", "warp_per_block"),
    (f"{_OP}.combine", "input", "indices"),
    (f"{_OP}.combine", "weights", "indices"),
    (f"{_OP}.combine", "block_num", "warp_per_block"),
    (f"{_OP}.combine", "rdma_block_num", "block_num"),
    (f"{_OP}.dispatch_send", "weights", "indices"),
    (f"{_OP}.dispatch_send", "block_num", "warp_per_block"),
    (f"{_OP}.dispatch_recv", "block_num", "warp_per_block"),
    (f"{_OP}.combine_send", "input", "indices"),
    (f"{_OP}.combine_send", "block_num", "warp_per_block"),
    (f"{_OP}.combine_recv", "block_num", "warp_per_block"),
    ("mori.shmem.shmem_init_attr", "flags", "unique_id"),
    ("mori.shmem.shmem_init_attr", "rank", "nranks"),
]
