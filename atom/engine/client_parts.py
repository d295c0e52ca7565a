"""What a client in the same process needs besides its connections: text, limits, routing, grammars."""

from dataclasses import dataclass
from typing import Any

from atom.engine.engine_host import EngineHost
from atom.shared.config.checkpoint import Checkpoint
from frontend.engine_client.dp_router import DPRouter, router_for
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.chat_template import ChatTemplate
from frontend.text.grammar_process import GrammarProcess
from frontend.text.input_processor import InputProcessor
from frontend.text.tokenizer import Tokenizer

__all__ = ["Chat", "ClientParts"]


@dataclass(frozen=True)
class ClientParts:
    """The parts for one model; the owner closes `grammar_process`."""

    inputs: InputProcessor
    """Its `max_model_len` is the model's until an engine has told its own."""
    router: DPRouter
    grammar_process: GrammarProcess
    """Starts its process with the first grammar."""

    @classmethod
    def of(cls, host: EngineHost) -> "ClientParts":
        """The parts for the engine of `host`, whose configuration is resolved. Raises ValueError."""
        config = host.config
        checkpoint = host.checkpoint
        inputs = InputProcessor(
            checkpoint,
            Tokenizer.from_checkpoint(checkpoint),
            checkpoint.max_model_len,
            config.scheduler.scheduling_policy,
            config.speculative,
        )
        router = router_for(config, config.parallel.data_parallel_size)
        return cls(inputs, router, GrammarProcess(checkpoint))


class Chat:
    """Makes prompts of conversations, in the model's chat template if it has one."""

    def __init__(self, checkpoint: Checkpoint, inputs: InputProcessor):
        """Raises ValueError for an invalid template."""
        template = ChatTemplate.from_checkpoint(checkpoint)
        self._encoder = None if template is None else ChatEncoder(template, inputs)

    @property
    def options(self) -> frozenset[str]:
        """Names of the variables that the template reads; empty without a template."""
        return frozenset() if self._encoder is None else self._encoder.template.options

    def prompt(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Token ids of a conversation. Raises ValueError without a template, and for an unknown option."""
        if self._encoder is None:
            raise ValueError("this model has no chat template: give prompts instead of messages")
        return self._encoder.encode(messages, options).ids
