"""What the offline engine sets that a server does not."""

import dataclasses

from atom.engine.llm_engine import _without_mixed_limit
from atom.shared.config.scheduler import SchedulerConfig
from tests.helpers.checkpoints.tiny_models import engine_config


def test_only_the_user_limits_mixed_steps() -> None:
    config = engine_config(block_size=16)
    for given, wanted in ((None, 4096), (512, 512)):
        scheduler = SchedulerConfig(max_num_batched_tokens=4096, max_num_mixed_tokens=given)
        found = _without_mixed_limit(dataclasses.replace(config, scheduler=scheduler))
        assert found.scheduler == dataclasses.replace(scheduler, max_num_mixed_tokens=wanted)
