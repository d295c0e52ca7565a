"""The bounds that are checked before a request is sent to the core."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import LogitsProcessors, pack_ids, unpack_ids
from atom.shared.sampling_params import SamplingParams
from frontend.errors import RequestError
from frontend.text import input_processor
from frontend.text.input_processor import InputProcessor
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> InputProcessor:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, eos_token_ids=[1, 7])
    return InputProcessor(checkpoint, Tokenizer.from_checkpoint(checkpoint), 100, "priority")


def test_the_sequences_of_a_prompt_are_one_request(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=5, n=3, temperature=0.5, top_k=-1, stop_token_ids=[9], priority=2)
    request = inputs.request([3, 4], params, [10, 11, 12])
    assert request.request_ids == [10, 11, 12] and request.sampling.sequence == 0
    assert unpack_ids(request.prompt_ids).tolist() == [3, 4]
    assert (request.max_tokens, request.priority, request.sampling.top_k) == (5, 2, 0)
    assert (request.eos_token_ids, request.stop_token_ids) == ([1, 7], [9])


def test_what_fits_no_message_is_refused(inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(allowed_token_ids=list(range(100)))
    size = len(encode(inputs.request([3] * 20, params, [1])))
    monkeypatch.setattr(input_processor, "MAX_ADD_REQUEST_BYTES", size)
    assert inputs.request([3] * 20, params, [1])
    with pytest.raises(RequestError, match=f"bytes inside the server, and at most {size} are possible"):
        inputs.request([3] * 21, params, [1])


def test_ignore_eos_sends_no_eos(inputs: InputProcessor) -> None:
    request = inputs.request([3], SamplingParams(ignore_eos=True), [1])
    assert request.eos_token_ids == []


def test_seeds(inputs: InputProcessor) -> None:
    def seed(value: int | None) -> int:
        return inputs.request([3], SamplingParams(seed=value), [1]).sampling.seed

    assert seed(5) == 5
    assert seed(-1) == (1 << 64) - 1
    assert seed(None) != seed(None)


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"presence_penalty": 0.5}, {"min_tokens": 2}])
def test_what_rules_the_text_is_refused_where_acceptance_is_forced(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    for length, refused in ((None, False), (2.0, True)):
        drafts = SpeculativeConfig("ngram", 3, spec_decode_acceptance_length=length)
        inputs = InputProcessor(checkpoint, Tokenizer.from_checkpoint(checkpoint), 100, "fcfs", drafts)
        assert inputs.request([3], SamplingParams(temperature=0.5), [1])
        if refused:
            with pytest.raises(RequestError, match="forces the acceptance of drafts"):
                inputs.request([3], SamplingParams(**asked), [1])
        else:
            assert inputs.request([3], SamplingParams(**asked), [1])


def test_an_exact_fit_is_taken_and_one_more_refused(inputs: InputProcessor) -> None:
    assert inputs.request([3] * 90, SamplingParams(max_tokens=10), [1])
    with pytest.raises(RequestError, match=r"100 tokens, but 101 .* 90 in the prompt and 11 to generate"):
        inputs.request([3] * 90, SamplingParams(max_tokens=11), [1])
    with pytest.raises(RequestError, match="maximum context length is 100"):
        inputs.room([3] * 100)


@pytest.mark.parametrize("bad", [[-1], [360], [3, 1 << 40]])
def test_ids_outside_the_vocabulary_are_refused(inputs: InputProcessor, bad: list[int]) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        inputs.request(bad, SamplingParams(), [1])
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        inputs.request([3], SamplingParams(stop_token_ids=[359, 360]), [1])
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("prediction", "message"), [([3, -1], "token id -1"), ([1 << 20], "token id"), ([3] * 101, "100 tokens")]
)
def test_predicted_ids_that_cannot_be_generated_are_refused(
    inputs: InputProcessor, prediction: list[int], message: str
) -> None:
    assert inputs.request([3], SamplingParams(), [1], prediction_ids=[3] * 100)
    with pytest.raises(RequestError, match=message) as error:
        inputs.request([3], SamplingParams(), [1], prediction_ids=prediction)
    assert error.value.param == "prediction"


def test_an_empty_prompt_is_refused(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="empty"):
        inputs.request([], SamplingParams(), [1])


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
    assert inputs.request([3], SamplingParams(priority=0), [1]).priority == 0
    with pytest.raises(RequestError, match="start with --scheduling-policy priority"):
        inputs.request([3], SamplingParams(priority=1), [1])


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    inputs = InputProcessor(tiny_tokenizer.checkpoint(tmp_path), None, 100, "fcfs")
    with pytest.raises(RequestError, match="use stop_token_ids"):
        inputs.request([3], SamplingParams(stop_strings=["x"]), [1])


def logits_processors(inputs: InputProcessor, **params: Any) -> LogitsProcessors | None:
    return inputs.request([3], SamplingParams(**params), [1]).sampling.logits_processors


def test_neutral_parameters_need_no_logits_processors(inputs: InputProcessor) -> None:
    assert logits_processors(inputs, temperature=0.5, stop_token_ids=[9], ignore_eos=True) is None
    assert logits_processors(inputs, presence_penalty=0.0, logit_bias={}, bad_words=[], min_tokens=0) is None


def test_logits_processors_have_the_requested_values(inputs: InputProcessor) -> None:
    processors = logits_processors(
        inputs,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={9: 3, 4: -1.5},
        allowed_token_ids=[8, 5, 8],
        min_tokens=2,
        stop_token_ids=[11],
    )
    assert processors == LogitsProcessors(
        allowed_ids=pack_ids([5, 8]),
        min_tokens=2,
        end_ids=[1, 7, 11],
        bias_ids=pack_ids([9, 4]),
        bias_values=[3.0, -1.5],
        repetition_penalty=1.5,
        frequency_penalty=-1.0,
        presence_penalty=0.5,
    )


def test_min_tokens_exclude_only_ids_that_end_the_request(inputs: InputProcessor) -> None:
    processors = logits_processors(inputs, min_tokens=2, ignore_eos=True)
    assert processors is not None
    assert (processors.min_tokens, processors.end_ids) == (2, [])


def test_bad_words_are_excluded_with_and_without_a_space(inputs: InputProcessor) -> None:
    assert inputs.tokenizer is not None
    plain, spaced = (inputs.tokenizer.encode(text, False) for text in ("fox", " fox"))
    processors = logits_processors(inputs, bad_words=[" fox"])
    assert processors is not None
    assert processors.bad_words == [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def test_bad_words_outside_the_models_vocabulary_need_no_logits_processor(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    beyond = min(min(tokenizer.encode(text, False)) for text in ("fox", " fox"))
    small = InputProcessor(replace(checkpoint, vocab_size=beyond), tokenizer, 100, "fcfs")
    assert logits_processors(small, bad_words=["fox"]) is None


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_ids_of_logits_processors_are_in_the_vocabulary(inputs: InputProcessor, field: str) -> None:
    value = {360: 1.0} if field == "logit_bias" else [5, 360]
    with pytest.raises(RequestError, match=f"360 in {field} is outside") as caught:
        logits_processors(inputs, **{field: value})
    assert caught.value.param == field


def test_at_least_one_id_must_be_allowed(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="no token could be generated"):
        logits_processors(inputs, allowed_token_ids=[1, 7], min_tokens=1)
    assert logits_processors(inputs, allowed_token_ids=[1, 7, 8], min_tokens=1) is not None


def test_log_probabilities_and_salts_are_passed_on(inputs: InputProcessor) -> None:
    plain = inputs.request([3], SamplingParams(), [1])
    assert (plain.sampling.logprobs, plain.prompt_logprobs, plain.cache_salt) == (-1, -1, "")
    request = inputs.request([3], SamplingParams(logprobs=0, prompt_logprobs=5), [1], "pepper")
    assert (request.sampling.logprobs, request.prompt_logprobs, request.cache_salt) == (0, 5, "pepper")
