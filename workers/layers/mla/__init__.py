"""Multi-head latent attention (MLA) layers, dense, sharded and sparse."""
