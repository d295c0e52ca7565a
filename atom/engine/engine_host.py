"""The start of an engine, as the server, the library and other programs' workers have it in common."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.kv_peers import prompt_transfer
from atom.shared.config.model import ModelConfig
from atom.shared.config.resolve import DeviceCapabilities, resolve
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.utils import envs
from atom.shared.utils.logger import get_logger
from atom.supervisor import Prepared, Supervisor

__all__ = ["EngineHost", "Prepare", "check_no_other_servers", "check_one_node", "check_same_engines"]

Prepare = Callable[[ModelConfig, SpeculativeConfig], Prepared]


class EngineHost:
    """What one run of the engine is started with: `prepare`, then `resolve`, then `start`.

    Between two steps the owner may replace `checkpoint` or `config`.
    """

    checkpoint: Checkpoint
    """After `prepare`."""
    capabilities: DeviceCapabilities
    """The GPUs and cores of this host, after `prepare`."""

    def __init__(self, config: EngineConfig, explicit: set[str]):
        """`explicit` names the settings that the user gave."""
        self.config = config
        """As given; complete after `resolve`."""
        self._explicit = explicit

    def prepare(self, prepare: Prepare) -> None:
        """Read the checkpoint and examine the host with `prepare`. Raises StartError.

        A draft model that was named by its name on the hub is a directory then.
        """
        found = prepare(self.config.model, self.config.speculative)
        self.checkpoint, self.capabilities = found.checkpoint, found.device
        if found.draft_model is not None:
            speculative = replace(self.config.speculative, draft_model=found.draft_model)
            self.config = replace(self.config, speculative=speculative)

    def resolve(self, notes: Iterable[str] = ()) -> None:
        """Complete the configuration, and log what the user should know of it, followed by `notes`.

        Raises ConfigError for settings that exclude one another, the model or the host.
        """
        resolved = resolve(self.config, self.checkpoint, self._explicit, self.capabilities)
        self.config = resolved.config
        startup = envs.startup_notes(self.config.device.device, self.capabilities.rocm)
        for note in [*resolved.notes, *startup, *notes]:
            get_logger().info(note)

    def start(self, supervisor: Supervisor) -> None:
        """Start the engines; `Supervisor.wait_ready` waits for them. Raises StartError."""
        supervisor.start_engines(self.config, self.checkpoint)


def check_one_node(config: EngineConfig) -> None:
    """Raises ValueError for an engine on several nodes: a program starts one on its own node alone."""
    if config.parallel.nnodes > 1:
        raise ValueError(f"nnodes={config.parallel.nnodes}: atom-launch starts engines on several nodes")


def check_no_other_servers(config: EngineConfig) -> None:
    """Raises ValueError for prompts that servers hand over: their requests come over HTTP."""
    transfer = prompt_transfer(config.cache, config.parallel)
    if transfer.gives or transfer.takes:
        raise ValueError(
            "kv_transfer_config: NixlConnector hands prompts over between servers, by a field of requests: "
            "use atom-launch, or AsyncLLMEngine with prefill_engines"
        )


def check_same_engines(config: EngineConfig) -> None:
    """Raises ValueError for engines that only compute prompts: a frontend hands their requests over."""
    if config.parallel.prefill_engines:
        raise ValueError(
            f"prefill_engines={config.parallel.prefill_engines}: atom-launch and AsyncLLMEngine hand "
            "requests over to other engines, and LLMEngine does not; omit it"
        )
