"""Host memory that a GPU's copy engines may read and write directly."""

import weakref

import torch

__all__ = ["pin"]


def pin(memory: torch.Tensor, owner: object) -> int:
    """Pin host memory until `owner` is freed; returns CUDA's error, 0 if there is none."""
    cudart = torch.cuda.cudart()
    address = memory.data_ptr()
    status = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if not status:
        # Freed while it is pinned, its addresses could not be pinned again.
        weakref.finalize(owner, cudart.cudaHostUnregister, address)
    return status
