"""Finds the reply format of a checkpoint, by its chat template, or by the command line."""

from dataclasses import replace

from frontend.text.chat_template import ChatTemplate
from frontend.text.reply_formats.base import CallText, ReasoningIds, ReplyFormat, ReplyOptions, ReplyParser
from frontend.text.reply_formats.deepseek import DeepSeek, DeepSeekV3
from frontend.text.reply_formats.deepseek_v32 import DeepSeekV4, DeepSeekV32
from frontend.text.reply_formats.generic import Generic
from frontend.text.reply_formats.glm import Glm
from frontend.text.reply_formats.harmony import HarmonyFormat
from frontend.text.reply_formats.hermes import Hermes
from frontend.text.reply_formats.json_lists import Granite, Phi4Mini
from frontend.text.reply_formats.kimi_k2 import KimiK2
from frontend.text.reply_formats.llama3_json import Llama3Json
from frontend.text.reply_formats.minimax_m2 import MiniMaxM2
from frontend.text.reply_formats.mistral import ARGUMENTS, Mistral, MistralLists
from frontend.text.reply_formats.olmo3 import Olmo3
from frontend.text.reply_formats.pythonic import Pythonic
from frontend.text.reply_formats.qwen3_coder import Qwen3Coder
from frontend.text.reply_formats.text import TextParser, Think
from frontend.text.tokenizer import Tokenizer

__all__ = ["REASONING", "TOOL_CALLS", "TextFormat", "choose_format"]

_HARMONY = "gpt_oss"
_NONE = "none"
_OPENAI = "openai"
_OPENAI_REASONING = "openai_gptoss"

TOOL_CALLS: dict[str, type[TextParser]] = {
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeek,
    "deepseek_v32": DeepSeekV32,
    "deepseek_v4": DeepSeekV4,
    "generic": Generic,
    "glm45": Glm,
    "glm47": Glm,
    "granite": Granite,
    "granite4": Hermes,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "olmo3": Olmo3,
    "phi4_mini_json": Phi4Mini,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
}
"""vLLM's names, and "generic"; besides these, "openai" is Harmony, and "none" parses no tool calls."""

REASONING: dict[str, Think] = {
    "deepseek_r1": Think(implicit=True),
    "deepseek_v3": Think(),
    "glm45": Think(),
    "granite": Think("Here is my thought process:", "Here is my response:"),
    "granite_tags": Think(around=("<response>", "</response>")),
    "kimi_k2": Think(),
    "minimax_m2": Think(implicit=True),
    "mistral": Think("[THINK]", "[/THINK]"),
    "olmo3": Think(),
    "qwen3": Think(),
}
"""vLLM's names, and "granite_tags"; besides these, "openai_gptoss" is Harmony, and "none" separates no
reasoning."""

# The first one whose texts the template writes.
_SIGNS: tuple[tuple[tuple[str, ...], type[TextParser]], ...] = (
    (("<|tool_calls_section_begin|>",), KimiK2),
    (("<｜DSML｜function_calls>",), DeepSeekV32),
    (("<｜DSML｜tool_calls>",), DeepSeekV4),
    (("<｜tool▁calls▁begin｜>", "```json"), DeepSeekV3),
    (("<｜tool▁calls▁begin｜>",), DeepSeek),
    (("<arg_key>",), Glm),
    (("<minimax:tool_call>",), MiniMaxM2),
    (("[TOOL_CALLS]",), Mistral),
    (("<function_calls>",), Olmo3),
    (("functools",), Phi4Mini),
    (("<|tool_call|>", "<|/tool_call|>"), Phi4Mini),
    (("<|tool_call|>",), Granite),
    (("<function=",), Qwen3Coder),
    (("<tool_call>",), Hermes),
    (("[func_name1(",), Pythonic),
    (("<|python_tag|>",), Llama3Json),
    (('"parameters": ',), Llama3Json),
)

# The first one whose text the template writes, before the common one.
_THINK_SIGNS = (
    ("[/THINK]", "mistral"),
    ("Here is my response:", "granite"),
    ("<response>", "granite_tags"),
)


class TextFormat:
    """Replies in text, with reasoning and tool calls between markers."""

    efforts = None
    frame = None

    def __init__(self, calls: type[TextParser] | None, think: Think | None, tokenizer: Tokenizer | None):
        self._calls = calls
        self._think = think
        self._tokenizer = tokenizer
        markers = [*(calls.MARKERS if calls else ()), *(think.markers if think else ())]
        self._special = {i: text for text in markers if (i := self._special_id(text)) is not None}

    @property
    def parses_calls(self) -> bool:
        return self._calls is not None

    @property
    def describes_tools(self) -> bool:
        return self._calls is Generic

    @property
    def call_text(self) -> CallText | None:
        text = self._calls.CALL_TEXT if self._calls is not None else None
        if text is None or self._calls is None:
            return None
        markers = self._calls.MARKERS
        has_tags = text.style not in ("json", "python")
        written = [marker for marker in markers if has_tags or marker in text.markup]
        tokens = {marker: i for i, marker in self._special.items() if marker in written}
        if tokens and (has_tags or len(tokens) < len(written)):
            return None  # tags of parameters must be text, and other markers all of one kind
        return replace(text, tokens=tokens)

    @property
    def separates_reasoning(self) -> bool:
        return self._think is not None

    def is_needed(self, options: ReplyOptions) -> bool:
        return self._think is not None or (self._calls is not None and options.tools is not None)

    def parser(self, options: ReplyOptions) -> ReplyParser:
        return (self._calls or TextParser)(options, self._think, self._special)

    def ends_thinking(self, prompt_ids: list[int], prompt: str) -> bool:
        """Whether the last added token of the prompt begins reasoning.

        Contents of messages never become added tokens of the template, so they cannot pretend it.
        """
        if self._think is None:
            return False
        begin = self._added_id(self._think.begin)
        tokenizer = self._tokenizer
        if begin is None or tokenizer is None:  # a vocabulary without such a token
            return prompt.rstrip().endswith(self._think.begin)
        return next((i == begin for i in reversed(prompt_ids) if i in tokenizer.added_ids), False)

    def reasoning_ids(self, prompt_ids: list[int], prompt: str) -> ReasoningIds | None:
        think = self._think
        tokenizer = self._tokenizer
        if think is None or tokenizer is None:
            return None
        begin = self._added_id(think.begin)
        end = self._added_id(think.end)
        last = next((i for i in reversed(prompt_ids) if i in tokenizer.added_ids), None)
        if last is not None and last == end:
            return None  # the template has closed the reasoning
        inside = think.implicit or self.ends_thinking(prompt_ids, prompt)
        return ReasoningIds(inside, None if inside else begin, end)

    def _added_id(self, text: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.added_id(text)

    def _special_id(self, text: str) -> int | None:
        token_id = self._added_id(text)
        special = self._tokenizer.special_ids if self._tokenizer is not None else frozenset()
        return token_id if token_id in special else None


def choose_format(
    model_type: str,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    tool_calls: str | None = None,
    reasoning: str | None = None,
) -> ReplyFormat | None:
    """The format of a model's replies; None: all text is content.

    `tool_calls` and `reasoning` are the names from the command line, which override the template. Raises
    ValueError for names that do not go together.
    """
    if tokenizer is None:
        return None
    if _is_harmony(model_type, tool_calls, reasoning):
        return HarmonyFormat(tokenizer)
    calls = _calls_of(template) if tool_calls is None else TOOL_CALLS.get(tool_calls)
    if calls is Mistral and tokenizer.added_id(ARGUMENTS) is None:
        calls = MistralLists
    think = _think_of(template) if reasoning is None else REASONING.get(reasoning)
    return TextFormat(calls, think, tokenizer) if calls or think else None


def _is_harmony(model_type: str, tool_calls: str | None, reasoning: str | None) -> bool:
    given = [name for name in (tool_calls, reasoning) if name is not None]
    harmony = [name for name in given if name in (_OPENAI, _OPENAI_REASONING)]
    if harmony and len(harmony) != len(given):
        raise ValueError(
            f"--tool-call-parser {tool_calls} and --reasoning-parser {reasoning} do not go together: "
            f"{_OPENAI} and {_OPENAI_REASONING} are one format"
        )
    return bool(harmony) or (not given and model_type == _HARMONY)


def _calls_of(template: ChatTemplate | None) -> type[TextParser] | None:
    if template is None:
        return None
    if not template.reads_tools:
        return Generic
    return next((calls for signs, calls in _SIGNS if all(map(template.source.writes, signs))), None)


def _think_of(template: ChatTemplate | None) -> Think | None:
    think = Think()
    if template is None:
        return None
    source = template.source
    # Some templates only begin the reasoning, at the end of the prompt.
    is_named = source.writes(think.begin) or source.writes(think.end) or source.searches(think.end)
    other = next((name for text, name in _THINK_SIGNS if source.writes(text)), None)
    return REASONING[other] if other is not None else think if is_named else None
