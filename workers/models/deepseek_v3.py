"""DeepSeek V3, V3.1 and R1, and what shares their graph (Kimi-K2, Moonlight)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.latent_decoder import CORRECTED_DEFAULTS, LatentDecoderLM, corrected_rule


class DeepseekV3ForCausalLM(LatentDecoderLM):
    """Experts are chosen by sigmoid scores with a correction, in the best groups."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**CORRECTED_DEFAULTS, **config}
        super().__init__(stated, corrected_rule(stated), build, correction_bias=True)


ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
