"""DeepSeek V3.2: V3 with sparse attention."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import SparseLatentDecoderLM

_DEFAULTS = {"index_n_heads": 64}


class DeepseekV32ForCausalLM(SparseLatentDecoderLM):
    """Every layer has an indexer, with NeoX-style RoPE."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        super().__init__(config, build, ["full"] * config["num_hidden_layers"], interleaved=False)


MTP_FIELD = "num_nextn_predict_layers"
ARCHITECTURES = {"DeepseekV32ForCausalLM": DeepseekV32ForCausalLM}
