"""Multi-head latent attention, dense and sparse: torch references."""
