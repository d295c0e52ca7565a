"""The bounds that are checked before the core hears of a request."""

from pathlib import Path

import pytest

from atom.messages.engine import unpack_ids
from atom.sampling_params import SamplingParams
from frontend.errors import RequestError
from frontend.input_processor import InputProcessor
from frontend.tokenizer import Tokenizer
from tests.helpers import tiny_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> InputProcessor:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, eos_token_ids=[1, 7])
    return InputProcessor(checkpoint, Tokenizer.from_checkpoint(checkpoint), 100, "priority")


def test_choices_share_all_but_their_number(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=5, n=3, temperature=0.5, top_k=-1, stop_token_ids=[9], priority=2)
    requests = inputs.requests([3, 4], params, [10, 11, 12])
    assert [request.request_id for request in requests] == [10, 11, 12]
    assert [request.sampling.choice for request in requests] == [0, 1, 2]
    assert len({request.sampling.seed for request in requests}) == 1
    first = requests[0]
    assert unpack_ids(first.prompt_ids).tolist() == [3, 4]
    assert (first.max_tokens, first.priority, first.sampling.top_k) == (5, 2, 0)
    assert (first.eos_token_ids, first.stop_token_ids) == ([1, 7], [9])


def test_ignore_eos_sends_no_eos(inputs: InputProcessor) -> None:
    (request,) = inputs.requests([3], SamplingParams(ignore_eos=True), [1])
    assert request.eos_token_ids == []


def test_seeds(inputs: InputProcessor) -> None:
    def seed(value: int | None) -> int:
        return inputs.requests([3], SamplingParams(seed=value), [1])[0].sampling.seed

    assert seed(5) == 5
    assert seed(-1) == (1 << 64) - 1
    assert seed(None) != seed(None)


def test_an_exact_fit_is_taken_and_one_more_refused(inputs: InputProcessor) -> None:
    assert inputs.requests([3] * 90, SamplingParams(max_tokens=10), [1])
    with pytest.raises(RequestError, match=r"100 tokens, but 101 .* 90 in the prompt and 11 to generate"):
        inputs.requests([3] * 90, SamplingParams(max_tokens=11), [1])
    with pytest.raises(RequestError, match="maximum context length is 100"):
        inputs.room([3] * 100)


@pytest.mark.parametrize("bad", [[-1], [360], [3, 1 << 40]])
def test_ids_outside_the_vocabulary_are_refused(inputs: InputProcessor, bad: list[int]) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        inputs.requests(bad, SamplingParams(), [1])
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        inputs.requests([3], SamplingParams(stop_token_ids=[359, 360]), [1])
    assert caught.value.param == "stop_token_ids"


def test_an_empty_prompt_is_refused(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="empty"):
        inputs.requests([], SamplingParams(), [1])


def test_bos_is_added_where_the_tokenizer_leaves_it_to_the_caller(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, add_bos_token=True)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [0, *plain]
    assert tokenizer.encode("<s>Hello") == [0, *plain]


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read .*tokenizer.json"):
        Tokenizer.from_checkpoint(checkpoint)


def test_priorities_need_the_policy_that_reads_them(tmp_path: Path) -> None:
    inputs = InputProcessor(tiny_tokenizer.checkpoint(tmp_path), None, 100, "fcfs")
    assert inputs.requests([3], SamplingParams(priority=0), [1])[0].priority == 0
    with pytest.raises(RequestError, match="start with --scheduling-policy priority"):
        inputs.requests([3], SamplingParams(priority=1), [1])


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    inputs = InputProcessor(tiny_tokenizer.checkpoint(tmp_path), None, 100, "fcfs")
    with pytest.raises(RequestError, match="use stop_token_ids"):
        inputs.requests([3], SamplingParams(stop_strings=["x"]), [1])
