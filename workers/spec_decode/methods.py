"""The speculation methods, by the name that `--method` has for them."""

from collections.abc import Callable, Sequence
from functools import partial

from atom.shared.config.speculative import SpeculativeConfig
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.causal_lm import CausalLM
from workers.spec_decode.block_proposer import BlockProposer
from workers.spec_decode.dflash import block_drafter
from workers.spec_decode.draft_model import draft_model_drafter
from workers.spec_decode.draft_passes import DraftPasses
from workers.spec_decode.drafter import Drafter, ModelMethod, ModelProposer
from workers.spec_decode.eagle3 import eagle3_drafter
from workers.spec_decode.mtp import mtp_drafter
from workers.spec_decode.ngram import ngram_method
from workers.spec_decode.proposer import Method
from workers.spec_decode.suffix import SuffixProposer
from workers.spec_decode.text_history import TextMethod

_OF_TEXT: dict[str, Callable[[SpeculativeConfig, Sequence[CacheGroup]], Method]] = {
    "ngram": ngram_method,
    "suffix": lambda config, groups: TextMethod(groups, SuffixProposer),
}
_OF_MODELS: dict[str, Callable[[CausalLM], Drafter]] = {
    "mtp": mtp_drafter,
    "draft_model": draft_model_drafter,
    "eagle3": eagle3_drafter,
}


def method_of(config: SpeculativeConfig, model: CausalLM, passes: DraftPasses | None = None) -> Method | None:
    """The configured method for a model; None without speculation. `passes`: see `Proposer`.

    Raises ValueError for a model that does not have what the method needs.
    """
    if config.method is None:
        return None
    if config.drafts_blocks:
        return ModelMethod(partial(BlockProposer, block_drafter(model)))
    if config.runs_model:
        return ModelMethod(partial(ModelProposer, _OF_MODELS[config.method](model), passes=passes))
    return _OF_TEXT[config.method](config, model.kv_groups)
