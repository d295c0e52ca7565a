"""Answer four prompts, three in English and one in Chinese; takes any engine flag.

python -m atom.examples.simple_inference --model PATH --temperature 0.6
"""

from atom import EngineArgs, LLMEngine, SamplingParams
from atom.shared.config.cli import CommandLineParser

PROMPTS = [
    "Why does bread dough rise? Answer in two sentences.",
    "A train leaves at 9:40 and arrives at 11:05. How long does it travel?",
    "Name three rivers that flow through more than one country.",
    "请用一句话解释为什么天空是蓝色的。",
]


def main() -> None:
    parser = CommandLineParser(description=__doc__)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with EngineArgs.from_cli_args(args).create_engine() as engine:
        prompts = [chat_prompt(engine, text) for text in PROMPTS]
        engine.generate([prompts[0]], SamplingParams(max_tokens=4))
        for prompt, output in zip(PROMPTS, engine.generate(prompts, params), strict=True):
            print(f"\nPrompt:   {prompt}\nResponse: {output['text']}")
            print(
                f"({output['num_tokens_input']} tokens in, {output['num_tokens_output']} out, "
                f"first after {output['ttft']:.3f} s, {output['tpot'] * 1e3:.1f} ms a token, "
                f"{output['finish_reason']})"
            )


def chat_prompt(engine: LLMEngine, text: str) -> list[int]:
    """One user message in the model's chat template, with thinking where the template supports it."""
    options = {"enable_thinking": True} if "enable_thinking" in engine.template_options else {}
    return engine.chat_prompt([{"role": "user", "content": text}], **options)


if __name__ == "__main__":
    main()
