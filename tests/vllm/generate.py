"""One run of vLLM's LLM class, in a process of its own: settings as JSON in, token ids as JSON out.

    python -m tests.vllm.generate '{"prompts": [[1, 2]], "max_tokens": 4, "llm": {"model": "…"}}'

The last line of the output has `ids`, a list for each prompt, and `platform`, the class of the platform.
"""

import json
import sys


def main() -> None:
    settings = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(**settings["llm"])
    sampling = SamplingParams(
        max_tokens=settings["max_tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    ids = []
    for _ in range(settings.get("rounds", 1)):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in settings["prompts"]], sampling)
        ids.append([list(output.outputs[0].token_ids) for output in outputs])
    cached = [output.num_cached_tokens for output in outputs]
    kind = type(current_platform)
    print(json.dumps({"ids": ids, "platform": f"{kind.__module__}.{kind.__name__}", "cached": cached}))


if __name__ == "__main__":
    main()
