"""Directories with the files of published checkpoints, and tiny random weights, chat and call a tool."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.chat_template import ChatTemplate
from frontend.text.detokenizer import Detokenizer
from frontend.text.input_processor import InputProcessor
from frontend.text.reply_formats.base import ReplyDelta, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import choose_format
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.checkpoints.checkpoint_contents import save_ranks, write
from tests.helpers.checkpoints.tiny_models import engine_config, place, tiny, tiny_config
from tests.helpers.engine.whole_engine import WholeEngine
from tests.helpers.text.replies import SHAPES, TOOLS, WRITERS
from workers.checkpoint.families import architectures
from workers.checkpoint.prepare import prepare
from workers.worker import Worker

FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": TOOLS["get_weather"]}
GLM = "<tool_call>{{ call.name }}{% for k, v in call.arguments.items() %}<arg_key>{{ k }}{% endfor %}"
CALLS = {
    "hermes": "<tool_call>{{ call | tojson }}",
    "qwen3_coder": "<tool_call><function={{ call.name }}>{% for k, v in call.arguments|items %}{% endfor %}",
    "glm45": GLM,
    "glm47": GLM,
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜>' + call['function']['arguments'] }}",
    "kimi_k2": "<|tool_calls_section_begin|>{{ call['function']['arguments'] | tojson }}",
    "mistral, list": "{{ '[TOOL_CALLS] [' + call.function | tojson }}",
    "mistral": "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}",
    "granite": "<|tool_call|>{{ call.function | tojson }}",
    "minimax_m2": "{{ '<minimax:tool_call>' }}{% for k, v in call.arguments.items() %}{{ k }}{% endfor %}",
    "olmo3": "{{ '<function_calls>' }}{% for k, v in call.function.arguments.items() %}{{ k }}{% endfor %}",
    "llama3_json": "{{ '\"parameters\": ' }}{{ call.arguments | tojson }}",
}
KIMI = {
    "256": "[BOS]", "257": "[EOS]", "258": "<|im_end|>", "267": "<|tool_calls_section_begin|>",
    "268": "<|tool_calls_section_end|>", "269": "<|tool_call_begin|>", "270": "<|tool_call_argument_begin|>",
    "271": "<|tool_call_end|>",
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A checkpoint on the hub."""

    name: str
    model: str
    """Its row of the tiny models."""
    calls: str
    """The writer of its tool calls."""
    model_type: str = ""
    around: str = ""
    """The model_type of the configuration that holds the model's as `text_config`; empty: none does."""
    tokenizer: Sequence[str] | None = ("</s>",)
    """The added tokens of tokenizer.json, the last of which ends replies; None: tiktoken.model instead."""
    outside: Sequence[str] = ()
    """Tokens that only tokenizer_config.json adds."""
    template: str = "chat_template.jinja"
    """Its place; empty: it has none."""
    generation: dict[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    """Further files."""
    caches: int = 1
    """Groups of layers that cache alike."""


PUBLISHED = [
    Published("Qwen/Qwen3-0.6B", "qwen3", "hermes", tokenizer=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
              outside=("<tool_response>",), template="tokenizer_config.json",
              files=("merges.txt", "vocab.json")),
    Published("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-moe", "qwen3_coder",
              tokenizer=("<|endoftext|>", "<|im_end|>"), files=("qwen3coder_tool_parser.py", "merges.txt")),
    Published("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next", "hermes", tokenizer=("<|im_end|>",),
              template="tokenizer_config.json", caches=2),
    Published("meta-llama/Llama-3.1-8B-Instruct", "llama-llama3-rope", "llama3_json",
              tokenizer=("<|begin_of_text|>", "<|eom_id|>", "<|eot_id|>"), template="tokenizer_config.json",
              files=("original/params.json", "special_tokens_map.json")),
    Published("mistralai/Mistral-7B-Instruct-v0.3", "mistral", "mistral, list",
              tokenizer=("[TOOL_CALLS]", "</s>"),
              files=("tokenizer.model.v3", "consolidated.safetensors", "params.json")),
    Published("deepseek-ai/DeepSeek-V3.1", "deepseek-v3", "deepseek_v31",
              files=("configuration_deepseek.py", "assets/code_agent_trajectory.html")),
    Published("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2", "deepseek_v32", template="",
              tokenizer=("｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>"),
              files=("encoding/encoding_dsv32.py",)),
    Published("deepseek-ai/DeepSeek-V4-Flash", "deepseek-v4", "deepseek_v4", template="",
              tokenizer=("｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>"), caches=4,
              files=("encoding/encoding_dsv4.py", "encoding/tests/test_output_1.txt")),
    Published("moonshotai/Kimi-K2-Instruct", "deepseek-v3", "kimi_k2", model_type="kimi_k2", tokenizer=None,
              generation={"eos_token_id": 258}, files=("tokenization_kimi.py", "configuration_deepseek.py")),
    Published("moonshotai/Moonlight-16B-A3B-Instruct", "deepseek-v3", "kimi_k2", tokenizer=None,
              template="tokenizer_config.json", files=("tokenization_moonshot.py",)),
    Published("mistralai/Ministral-3-8B-Instruct-2512", "ministral3", "mistral",
              tokenizer=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "</s>")),
    Published("mistralai/Mistral-Small-4-119B-2603", "mistral-small-4", "mistral", around="mistral3",
              tokenizer=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "</s>")),
    Published("ibm-granite/granite-3.3-8b-instruct", "granite", "granite",
              tokenizer=("<|tool_call|>", "<|end_of_text|>"), template="tokenizer_config.json"),
    Published("allenai/Olmo-3-7B-Instruct", "olmo3", "olmo3",
              tokenizer=("<function_calls>", "</function_calls>", "<|endoftext|>", "<|im_end|>"), caches=2),
    Published("Qwen/Qwen3.5-9B", "qwen3.5", "qwen3_coder", around="qwen3_5",
              tokenizer=("<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>"), caches=2,
              files=("merges.txt", "vocab.json")),
    Published("moonshotai/Kimi-K2.5", "deepseek-v3", "kimi_k2", model_type="kimi_k2", around="kimi_k25",
              tokenizer=None, generation={"eos_token_id": 258},
              files=("tokenization_kimi.py", "configuration_kimi_k25.py", "modeling_kimi_k25.py")),
    Published("MiniMaxAI/MiniMax-M2", "minimax-m2", "minimax_m2",
              tokenizer=("]~b]", "<minimax:tool_call>", "</minimax:tool_call>", "<think>",
                         "</think>", "[e~["),
              files=("configuration_minimax_m2.py", "merges.txt")),
    Published("zai-org/GLM-5.2", "glm-5", "glm47",
              tokenizer=("<|endoftext|>", "<think>", "</think>", "<|user|>")),
    Published("zai-org/GLM-4.5", "glm4-moe", "glm45", tokenizer=("<|endoftext|>", "<think>", "<|user|>")),
]  # fmt: skip


def added(text: str) -> dict[str, Any]:
    return {"content": text, "special": not text.startswith("<tool"), "normalized": False}


def save(row: Published, directory: Path) -> None:
    """The files of the checkpoint, but for its weights."""
    model = tiny(row.model)
    model_type = row.model_type or model.model_type
    config = tiny_config(model).to_dict()
    names = {"model_type": model_type, "architectures": [architectures()[model_type][0]], "dtype": "float32"}
    config.update(names, vocab_size=600, eos_token_id=None)
    if row.around:
        names = {"model_type": row.around, "architectures": [architectures()[row.around][0]]}
        config = {**names, "text_config": config}
    write(directory, "config.json", config)
    write(directory, "generation_config.json", row.generation)
    settings: dict[str, Any] = {}
    if row.tokenizer is None:
        save_ranks(directory)
        tokens = {number: added(text) for number, text in KIMI.items()}
        settings = {
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": tokens,
            "eos_token": "[EOS]",
        }
    else:
        backend = tiny_tokenizer.build()
        backend.add_tokens([AddedToken(text, special=text != "｜DSML｜") for text in row.tokenizer])
        backend.save(str(directory / "tokenizer.json"))
        first = backend.get_vocab_size()
        tokens = {str(first + i): added(text) for i, text in enumerate(row.outside)}
        settings = {"eos_token": row.tokenizer[-1]} | ({"added_tokens_decoder": tokens} if tokens else {})
    call = CALLS.get(row.calls, "")
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        f"{{% for call in m.tool_calls %}}{call}{{% endfor %}}{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    if row.template == "tokenizer_config.json":
        settings["chat_template"] = template
    elif row.template:
        write(directory, row.template, template)
    write(directory, "tokenizer_config.json", settings)
    for name in row.files:
        if not name.endswith((".json", ".txt")):
            write(directory, name, "raise SystemExit")


def called(checkpoint: Checkpoint, template: ChatTemplate, tokenizer: Tokenizer, reply: str) -> ReplyDelta:
    """What is parsed of a reply, token by token."""
    found = choose_format(checkpoint.model_type, tokenizer, template)
    assert found is not None and found.parses_calls
    parser = found.parser(ReplyOptions(tools=TOOLS))
    detokenizer = Detokenizer(tokenizer)
    total = ReplyDelta()
    ids = tokenizer.encode(reply, add_special_tokens=False)
    parsed = [parser.feed(token, detokenizer.feed(token)) for token in ids]
    for delta in [*parsed, parser.finish(detokenizer.finish(), True)]:
        total.text += delta.text
        merge_calls(total.calls, delta.calls)
    return total


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_a_published_checkpoint_starts_chats_and_calls_a_tool(tmp_path: Path, row: Published) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save(row, directory)
    model = ModelConfig(model=str(directory), load_dummy=True)
    checkpoint = prepare(model, tmp_path / "cache", lambda *progress: None)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    template = ChatTemplate.from_checkpoint(checkpoint)
    assert tokenizer is not None and template is not None
    ends = {tokenizer.decode([token], skip_special_tokens=False) for token in checkpoint.eos_token_ids}
    assert ends >= {row.tokenizer[-1] if row.tokenizer else "[EOS]"}
    if row.generation:
        assert ends == {"<|im_end|>", "[EOS]"}

    inputs = InputProcessor(checkpoint, tokenizer, 10_000, "fcfs")
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": "Is it sunny in 北京?"}]
    prompt = ChatEncoder(template, inputs).encode(messages, {}, tools=tools).ids
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert "Is it sunny in 北京?" in text and '"name": "get_weather"' in text
    worker = Worker(engine_config(load_dummy=True), checkpoint, place(), lambda *progress: None)
    engine = WholeEngine(worker, [120] * row.caches, caching=not checkpoint.keeps_states)
    engine.add(0, prompt[-40:], 3)
    engine.run()
    assert len(engine.outputs[0].token_ids) == 3

    reply = called(checkpoint, template, tokenizer, WRITERS[row.calls][1](SHAPES["two"]))
    assert reply.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == SHAPES["two"].calls
