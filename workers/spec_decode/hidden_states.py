"""Models that draft from hidden states of the target: how they are built for it."""

from dataclasses import replace
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.decoder.aux_states import AuxStates
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.dflash import BlockDraftModel
from workers.layers.dspark import DsparkModel
from workers.layers.eagle3 import Eagle3Head
from workers.layers.hidden_states_reader import HiddenStatesReader
from workers.layers.quantization.config import resolve
from workers.weights.files import tensor_places

_MODELS: dict[str, type[HiddenStatesReader]] = {
    "eagle3": Eagle3Head,
    "dflash": BlockDraftModel,
    "dspark": DsparkModel,
}


def build_reader(
    own: Checkpoint, target: CausalLM, build: BuildContext, config: EngineConfig
) -> HiddenStatesReader:
    """The model that drafts for `target`, without its weights; the target keeps hidden states for it.

    Raises ValueError for what is not supported.
    """
    method, most_tokens = config.speculative.method, config.scheduler.max_num_batched_tokens
    assert method is not None and most_tokens is not None, "resolved before any worker starts"
    assert isinstance(target, DecoderLM), "checked by draft_checkpoint"
    reader = _MODELS[method]
    names = set() if config.model.load_dummy else tensor_places(Path(own.directory), {}).keys()
    quantization = resolve(own.hf_config, reader.packed_modules_mapping, None)
    try:
        model = reader(own.hf_config, target, names, replace(build, quantization=quantization))
    except KeyError as error:
        raise ValueError(f"config.json of {own.directory} lacks {error}") from error
    target.model.aux = AuxStates(model.aux_layers, most_tokens, target.model.hidden_size, build)
    return model
