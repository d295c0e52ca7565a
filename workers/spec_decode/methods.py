"""The speculation methods, by the name that `--method` has for them."""

from collections.abc import Callable, Sequence

from atom.shared.config.speculative import SpeculativeConfig
from workers.layers.attention.cache_groups import CacheGroup
from workers.spec_decode.ngram import Ngram
from workers.spec_decode.proposer import Method

_METHODS: dict[str, Callable[[SpeculativeConfig, Sequence[CacheGroup]], Method]] = {"ngram": Ngram}


def method_of(config: SpeculativeConfig, groups: Sequence[CacheGroup]) -> Method | None:
    """The configured method for a model with these KV groups; None without speculation."""
    return None if config.method is None else _METHODS[config.method](config, groups)
