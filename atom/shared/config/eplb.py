"""Expert load balancing: what `--eplb-config` says."""

from dataclasses import dataclass, fields

from atom.shared.config.fields import ConfigError, json_object
from atom.shared.config.parallel import ParallelConfig

SETTLING_STEPS = 16
"""Steps between the end of a window and the first move, for the counts to reach the host."""

_MAX_WINDOW = 10_000
"""Steps whose tokens are counted in 32 bits."""


@dataclass(frozen=True)
class EPLBConfig:
    """When experts move, and how many replicas there are."""

    window_size: int = 1000
    """Steps before a rebalance whose tokens are counted."""
    step_interval: int = 3000
    """Steps from one rebalance to the next."""
    num_redundant_experts: int = 0
    """Replicas of experts on all ranks of a MoE layer, in addition to one copy of each expert."""


def eplb_config(parallel: ParallelConfig) -> EPLBConfig | None:
    """None without `--enable-eplb`. Raises ConfigError for an `--eplb-config` that is not supported."""
    if not parallel.enable_eplb:
        return None
    given = json_object(parallel.eplb_config or "{}")
    names = [field.name for field in fields(EPLBConfig)]
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"--eplb-config: {name} is not supported; use {', '.join(names)}")
        if type(value) is not int or value < 0:
            raise ConfigError(f"--eplb-config: {name} is {value!r}: it must be a whole number from 0 up")
    config = EPLBConfig(**given)
    if not 1 <= config.window_size <= min(config.step_interval, _MAX_WINDOW):
        raise ConfigError(
            f"--eplb-config: window_size {config.window_size} must be from 1 to step_interval, "
            f"{config.step_interval}, and at most {_MAX_WINDOW}"
        )
    if config.step_interval <= SETTLING_STEPS:
        raise ConfigError(
            f"--eplb-config: step_interval {config.step_interval} must be more than {SETTLING_STEPS} steps"
        )
    return config
