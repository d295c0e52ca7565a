"""Memory of the device: peak, guard, KV tensors, the memory plan."""
