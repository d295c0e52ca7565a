"""500 random conversations with tiny pools and every tier have the ids of runs without any cache."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.helpers.engine.conversations import FAMILIES, Conversations, plans
from tests.helpers.servers.fake_redis import fake_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_equal_a_run_without_cache(name: str, tmp_path: Path) -> None:
    check = settings(max_examples=125, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    with fake_redis() as store:
        made = Conversations(name, tmp_path, store)

        @check
        @given(plans)
        def run(plan: object) -> None:
            made.run(plan)  # type: ignore[arg-type]

        run()
        made.close()
    assert made.loaded > 20
