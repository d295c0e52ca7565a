"""Text of tokens, without a client."""

from dataclasses import dataclass

from atom.shared.messages.engine import AddRequest, TokenDeltas
from frontend.text.output_processor import OutputProcessor, RequestState, SequenceOutput, TextOptions
from frontend.text.tokenizer import Tokenizer


@dataclass
class Running:
    state: RequestState


@dataclass
class Step:
    updates: list[SequenceOutput]
    aborts: list[int]


class TextOutputs:
    """An OutputProcessor with the sequences that a client would keep."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.processor = OutputProcessor(tokenizer)
        self.running: dict[int, Running] = {}

    def add(self, request: AddRequest, text: TextOptions) -> None:
        for request_id in request.request_ids:
            self.running[request_id] = Running(self.processor.new_state(request, text))

    def process(self, deltas: TokenDeltas) -> Step:
        done = self.processor.process(deltas, self.running)
        for _, update in done.updates:
            if update.finished:
                del self.running[update.request_id]
        return Step([update for _, update in done.updates], done.aborts)
