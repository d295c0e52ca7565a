"""DeepSeek V3, V3.1 and R1, and models with the same architecture (Kimi-K2, Moonlight)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.mla.latent_decoder import DEEPSEEK_V3_DEFAULTS, LatentDecoderLM, noaux_tc_rule


class DeepseekV3ForCausalLM(LatentDecoderLM):
    """Sigmoid routing with a correction bias, within the best groups."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**DEEPSEEK_V3_DEFAULTS, **config}
        super().__init__(config, noaux_tc_rule(config), build, correction_bias=True)


MTP_FIELD = "num_nextn_predict_layers"
ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
