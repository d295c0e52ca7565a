"""Compiled grammars: their source, the process that compiles them, and how a row uses one."""

import msgspec

from atom.shared.config.checkpoint import Checkpoint

MAX_SOURCE_BYTES = 8 * 1024 * 1024
"""Most bytes of one `CompiledGrammar.source`."""
MAX_GRAMMAR_MEMORY = 64 * 1024 * 1024
"""Most memory of one compiled grammar in a worker, in bytes."""


class GrammarSource(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What to compile."""

    kind: str
    """json_schema, json_object, regex, grammar (EBNF), structural_tag (JSON), or tool_calls: such a tag
    whose JSON schemas have `tool`, a name for errors, and `lenient`: whether one that cannot be enforced
    means any object."""
    text: str
    """The schema, the expression …; empty for json_object."""
    any_whitespace: bool = True
    """Whether JSON may have white space between its tokens, at most 16 characters."""


class CompiledGrammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The response of the compile process: `error`, or a grammar that can be used."""

    source: bytes = b""
    """The `GrammarSource`, encoded. The worker compiles it again, which takes less
    time than to read what xgrammar 0.2.8 writes: that is 600 MB for 100 tools, as each rule repeats all."""
    memory: int = 0
    """Bytes that it takes in a worker."""
    token_us: int = 0
    """CPU time that a token takes in a worker, in microseconds."""
    error: str = ""
    """Why the source cannot be used, in one line, for the client."""
    warnings: list[str] = []
    """What the grammar does not enforce, for the client."""


class GrammarCompilerLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.grammar.compile_process`."""

    checkpoint: Checkpoint
    control_fd: int
    """An inherited Unix socket, over which the parent passes one connected socket for each source."""
    cpu_s: int
    """Seconds of CPU time for each source, in each thread; a longer compilation is killed."""
    max_parallel: int
    """Sources that are compiled at a time."""
    deadline_s: int
    """Seconds of wall time for each source; a longer compilation is killed."""


class GrammarMatcherLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.grammar.matcher_process`."""

    checkpoint: Checkpoint
    control_fd: int
    """An inherited Unix socket, over which the worker passes two descriptors for each grammar: a connected
    socket, and memory for the masks."""


class RowGrammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The grammar of one sequence's output."""

    key: bytes
    """Identifies the compiled grammar."""
    stop_ids: list[int]
    """Ids that may be sampled where the text is complete; they end it."""
    in_reasoning: bool = False
    """Whether the output begins inside of reasoning: the grammar begins after `reasoning_end`."""
    reasoning_begin: int = -1
    """The id with which an output may begin its reasoning; -1: it cannot."""
    reasoning_end: int = -1
    """The id that ends reasoning; -1: the output has none."""


class Grammar(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """The grammar of a request, by its key: the core asks for its source if its workers lack it."""

    row: RowGrammar
    memory: int
    """As in `CompiledGrammar`."""
    token_us: int = 0
    """As in `CompiledGrammar`."""


class GetGrammar(msgspec.Struct, tag=15, array_like=True, frozen=True, gc=False):
    """From the core to the frontend of an unfinished request: send its grammar as a `GrammarBytes`.

    There is no response if the frontend has ended the request: its Abort is on the way.
    """

    key: bytes


class GrammarBytes(msgspec.Struct, tag=9, array_like=True, frozen=True, gc=False):
    """The response to `GetGrammar`."""

    key: bytes
    source: bytes
    """As in `CompiledGrammar`."""


class LoadGrammar(msgspec.Struct, tag=20, array_like=True, frozen=True, gc=False):
    """From the core to its workers: load a grammar, for rows that come later. Rank 0 does."""

    key: bytes
    source: bytes


class DropGrammar(msgspec.Struct, tag=21, array_like=True, frozen=True, gc=False):
    """No further row uses the grammar."""

    key: bytes


class GrammarLoaded(msgspec.Struct, tag=22, array_like=True, frozen=True, gc=False):
    """From rank 0: rows may use the grammar, unless `error` or `is_lost`."""

    key: bytes
    error: str = ""
    is_refused: bool = False
    """With an error: whether the grammar itself is the cause, as its process needed too much."""
    is_lost: bool = False
    """The process of a grammar has ended by no fault of it: load it again. Its rows are late until then."""


class StartMatcher(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """From a worker to the process of a grammar, first of all."""

    source: bytes
    """As in `CompiledGrammar`."""
    num_slots: int
    num_words: int
    """int32 words of a mask. The shared memory has `num_slots` times `masks_per_slot` masks."""
    masks_per_slot: int = 1
    """One for the next id, and one for the id after each draft."""


class MatcherStarted(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Its response: outputs may be followed, unless `error`."""

    error: str = ""
    pid: int = 0
    """Its process id."""


class FollowOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The output of a slot goes on with `ids`."""

    slot: int
    ids: list[int]
    begin: RowGrammar | None = None
    """Forget the slot's output before, and begin this one."""
    drafts: list[int] = []
    """Ids that may follow: the masks after each of them are wanted, too, up to the first that the grammar
    refuses. At most `masks_per_slot` - 1."""


class FollowOutputs(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """From a worker to the process of a grammar: these outputs go on, each slot at most once."""

    serial: int
    """Number of this message, for `MasksReady`."""
    outputs: list[FollowOutput]


class ForgetOutput(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """From a worker to the process of a grammar: the output of a slot has ended."""

    slot: int


class MasksReady(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """From the process of a grammar: the masks of these slots are those after message `serial`."""

    serial: int
    slots: list[int]
    failures: dict[int, str] = {}
    """Why outputs cannot go on, by slot; their masks allow every id from then on."""
