"""Command line arguments of an engine, for scripts that create one.

parser = argparse.ArgumentParser()
EngineArgs.add_cli_args(parser)
engine = EngineArgs.from_cli_args(parser.parse_args()).create_engine()
"""

import argparse
from dataclasses import dataclass

from atom.engine.llm_engine import LLMEngine
from atom.shared.config.cli import add_engine_args, engine_config_from, explicit_fields, with_environment
from atom.shared.config.engine import EngineConfig


@dataclass(frozen=True)
class EngineArgs:
    """The configuration, and the names of the fields that the user set."""

    config: EngineConfig
    explicit: frozenset[str]

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every engine flag to `parser`, and return it."""
        add_engine_args(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Arguments that are absent are taken from the ATOM_ environment variables.

        Raises ConfigError, a ValueError, for a value outside its range.
        """
        args = with_environment(args)
        return cls(engine_config_from(args), frozenset(explicit_fields(args)))

    def create_engine(self) -> LLMEngine:
        """Start the engine; raises RuntimeError with the root cause when it cannot."""
        return LLMEngine.from_config(self.config, set(self.explicit))
