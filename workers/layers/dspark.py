"""DSpark: DFlash's decoder, whose drafts also depend on the token before, by a Markov head.

    last id, mask, mask, …  at s, s + 1, … ─ layers ─ norm ─ LM head ─┬─ + ─► draft for s + 1, s + 2, …
    last id, draft for s + 1, …  ───────── markov_w1 ─── markov_w2 ───┘

The hidden state of each place gives the draft after it. The layers compute the block in one pass; the drafts
are sampled one after another.

R rows of K drafts, V vocabulary.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from atom_ops import SamplingBatch, sample
from parallel.communicator import Communicator
from workers.checkpoint.draft_configs import block_fields
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.dflash import BlockDraftModel
from workers.layers.embedding import LMHead, VocabEmbedding


class MarkovHead(nn.Module):
    """What the token before adds to a draft's logits; whole on every rank, for there is one pass a draft."""

    def __init__(self, vocab_size: int, rank: int, build: BuildContext):
        super().__init__()
        build = replace(build, tp=Communicator())
        self.markov_w1 = VocabEmbedding(vocab_size, rank, build.at("markov_w1"))
        self.markov_w2 = LMHead(vocab_size, rank, build.at("markov_w2"), None)

    def forward(self, ids_R: torch.Tensor) -> torch.Tensor:
        """float32 [R, V]."""
        return self.markov_w2(self.markov_w1(ids_R))


class DsparkModel(BlockDraftModel):
    """The drafter of a target model.

    Its confidence head is not loaded: how many drafts are verified follows from what was accepted before.
    """

    first_draft: ClassVar = 0

    def __init__(self, config: Mapping[str, Any], target: DecoderLM, names: Set[str], build: BuildContext):
        super().__init__(config, target, names, build)
        rank = block_fields(config)["markov_rank"]
        self.markov_head = MarkovHead(config["vocab_size"], rank, build.at("markov_head"))
        self.unused_on_disk = (*self.unused_on_disk, "confidence_head.*")

    @property
    def read_for_each_draft(self) -> list[nn.Module]:
        return [self.markov_head]

    def sample(
        self,
        hidden_RKD: torch.Tensor,
        last_ids_R: torch.Tensor,
        settings: SamplingBatch,
        positions_RK: torch.Tensor,
    ) -> torch.Tensor:
        logits_SV = self._logits(hidden_RKD.flatten(0, 1))
        logits_RKV = logits_SV.view(*positions_RK.shape, -1)
        ids_R = last_ids_R
        drafts = []
        for place in range(positions_RK.shape[1]):
            logits_RV = logits_RKV[:, place] + self.markov_head(ids_R)
            ids_R = sample(logits_RV, settings, positions_RK[:, place].contiguous())
            drafts.append(ids_R)
        return torch.stack(drafts, 1)
