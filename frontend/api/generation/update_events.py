"""The events of one update of a stream, whatever the endpoint."""

from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.renderer import Renderer
from frontend.api.generation.usage import UsageCounter
from frontend.engine_client.streams import Stream
from frontend.errors import EngineError, RequestError
from frontend.text.output_processor import SequenceOutput

__all__ = ["raise_error", "update_events"]


def update_events(
    renderer: Renderer,
    request: GenerateRequest,
    counter: UsageCounter,
    update: SequenceOutput,
    stream: Stream,
) -> bytes:
    """The events of an update, after those before its choice if it is the first of it; counts its tokens.

    Raises ApiError for the error of an update.
    """
    raise_error(update)
    index = request.index(update)
    continuous = request.options.continuous_usage
    before = b""
    if counter.is_first(index):
        before = renderer.begin(index, update, counter.usage(stream) if continuous else None)
    counter.count(index, request.visible(update))
    return before + renderer.delta(index, update, counter.usage(stream) if continuous else None)


def raise_error(update: SequenceOutput) -> None:
    """Raise ApiError if the update ends its sequence with an error."""
    if update.is_refused:
        raise RequestError(update.error)
    if update.error:
        raise EngineError(update.error, code="engine_error")
