"""ATOM's models and kernels inside other engines' processes, as their plugin."""
