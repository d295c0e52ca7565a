"""The metrics of a run."""

import numpy as np
import pytest

from atom.benchmarks.backend_request_func import RequestFuncOutput
from atom.benchmarks.serving.metrics import Distribution, calculate_metrics, percentile_name
from atom.benchmarks.serving.run import count_tokens
from atom.benchmarks.serving.speculation import Speculation


def output(ttft: float, gaps: list[float], tokens: int | None = None, **changes: object) -> RequestFuncOutput:
    """An output whose tokens came after these intervals."""
    found = RequestFuncOutput(
        generated_text="x",
        success=True,
        latency=ttft + sum(gaps),
        output_tokens=len(gaps) + 1 if tokens is None else tokens,
        ttft=ttft,
        itl=gaps,
        prompt_len=10,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def failed() -> RequestFuncOutput:
    return RequestFuncOutput(prompt_len=10, error="status 500")


def test_throughput_counts_what_succeeded() -> None:
    outputs = [output(0.1, [0.2, 0.2]), output(0.3, [0.1]), failed()]
    metrics = calculate_metrics(outputs, 2.0, [50], {})
    assert (metrics.completed, metrics.total_input, metrics.total_output) == (2, 20, 5)
    assert metrics.request_throughput == 1.0
    assert metrics.output_throughput == 2.5
    assert metrics.total_token_throughput == 12.5
    assert metrics.request_goodput is None
    assert metrics.concurrency == pytest.approx((0.5 + 0.4) / 2)


def test_latencies_are_milliseconds() -> None:
    outputs = [output(0.1, [0.2, 0.4]), output(0.3, [0.1])]
    found = calculate_metrics(outputs, 1.0, [50, 100], {}).distributions
    assert found["ttft"].mean == pytest.approx(200) and found["ttft"].median == pytest.approx(200)
    assert found["ttft"].std == pytest.approx(100)
    assert found["tpot"].mean == pytest.approx((300 + 100) / 2)
    assert found["itl"].median == pytest.approx(200)
    assert found["itl"].percentiles[1] == (100, pytest.approx(400))
    assert found["e2el"].mean == pytest.approx((700 + 400) / 2)


def test_tokens_in_one_event_give_one_interval_and_the_true_tpot() -> None:
    found = calculate_metrics([output(0.1, [0.4], tokens=5)], 1.0, [99], {}).distributions
    assert found["itl"].mean == pytest.approx(400)
    assert found["tpot"].mean == pytest.approx(100)


def test_an_output_of_one_token_has_no_tpot() -> None:
    metrics = calculate_metrics([output(0.1, []), output(0.1, [0.3])], 1.0, [99], {"tpot": 350})
    assert metrics.distributions["tpot"].mean == pytest.approx(300)
    assert metrics.request_goodput == 2.0


def test_goodput_needs_every_goal() -> None:
    outputs = [output(0.1, [0.02]), output(0.3, [0.02]), output(0.1, [0.06]), failed()]
    assert calculate_metrics(outputs, 2.0, [], {"ttft": 200, "tpot": 50}).request_goodput == 0.5
    assert calculate_metrics(outputs, 2.0, [], {"ttft": 200}).request_goodput == 1.0
    assert calculate_metrics(outputs, 2.0, [], {"e2el": 165}).request_goodput == 1.0
    assert calculate_metrics(outputs, 2.0, [], {"e2el": 1}).request_goodput == 0.0


def test_no_requests_give_zeros() -> None:
    metrics = calculate_metrics([failed()], 1.0, [99], {})
    assert metrics.completed == 0 and metrics.distributions["ttft"].percentiles == [(99, 0.0)]


def test_percentiles_are_numpys() -> None:
    seconds = [0.001 * i for i in range(1, 11)]
    found = Distribution.of(seconds, [25, 99.9])
    assert [value for _, value in found.percentiles] == pytest.approx(
        [float(np.percentile(np.arange(1, 11), part)) for part in (25, 99.9)]
    )


@pytest.mark.parametrize(("percentile", "name"), [(99.0, "99"), (99.9, "99.9"), (5.0, "5")])
def test_percentile_names(percentile: float, name: str) -> None:
    assert percentile_name(percentile) == name


def test_events_are_counted_without_usage_and_tokenizer() -> None:
    silent, counted = output(0.1, [0.1, 0.1], output_tokens=None), output(0.1, [0.1], tokens=9)
    count_tokens([silent, counted, failed()], None)
    assert (silent.output_tokens, counted.output_tokens) == (3, 9)


METRICS_PAGE = """# HELP vllm:spec_decode_num_drafts_total Drafts.
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
"""


def test_speculation_is_a_difference_of_counters() -> None:
    after = Speculation.parse(METRICS_PAGE)
    assert after == Speculation(20, 60, 30)
    run = after - Speculation(10, 30, 5)
    assert run.accept_length == pytest.approx(3.5)
    assert run.acceptance_rate == pytest.approx(25 / 30)
    assert (after - after).accept_length is None
    assert Speculation.parse("up 1\n") is None


def test_forced_acceptance_is_a_part_of_the_result() -> None:
    forced = Speculation.parse(METRICS_PAGE + 'atom:spec_decode_forced_length{engine="0"} 2.88\n')
    assert forced is not None and (forced - forced).forced_length == 2.88
