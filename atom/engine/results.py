"""Results of the client in the library's own types."""

from collections.abc import Iterable

from atom.shared.outputs import Logprobs, RequestOutput
from atom.shared.sampling_params import SamplingParams
from frontend.text.output_processor import SequenceOutput, TextOptions
from frontend.text.token_logprobs import TokenLogprob

__all__ = ["logprobs_of", "output_of", "text_options"]


def text_options(params: SamplingParams) -> TextOptions:
    """How the text of a request with these parameters is made."""
    stops = params.stop_strings or ()
    return TextOptions(stops, params.include_stop_str_in_output, params.skip_special_tokens)


def logprobs_of(entries: Iterable[TokenLogprob]) -> list[Logprobs]:
    """One dictionary for each token: itself first, then the most likely ones."""
    return [{entry.token_id: entry.logprob} | dict(entry.top) for entry in entries]


def output_of(
    update: SequenceOutput,
    request_id: int | str,
    index: int,
    num_cached_tokens: int,
    logprobs: list[Logprobs],
) -> RequestOutput:
    """The output of sequence `index` of a request; `logprobs` are those of the update."""
    return RequestOutput(
        request_id,
        update.token_ids.tolist(),
        update.text,
        update.finished,
        update.reason,
        num_cached_tokens,
        logprobs,
        index,
    )
