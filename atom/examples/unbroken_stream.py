"""Chat with the openai package, in streams that outlive their connection and their frontend.

    python -m atom.examples.unbroken_stream --base-url http://127.0.0.1:8000/v1 "Tell me a long story."

`chunks` gives what `client.chat.completions.create(stream=True)` gives. Where the connection breaks, it sends
the request again with the id of the last event, and gets the rest without a gap or a repeat.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

_PATIENCE_S = 30.0
"""As long as the server keeps a stream: --orphan-grace."""


def chunks(client: openai.OpenAI, **request: Any) -> Iterator[ChatCompletionChunk]:
    """The chunks of a chat completion with one choice. Raises openai.APIError."""
    headers = {"X-Resumable-Stream": "true"}
    key = ""
    count = 0  # an event of a stream with one choice has as id the stream's, and its own number
    until = 0.0
    while True:
        try:
            with client.chat.completions.create(**request, stream=True, extra_headers=headers) as stream:
                key = stream.response.headers["X-Stream-Id"]
                for chunk in stream:
                    count += 1
                    until = time.monotonic() + _PATIENCE_S
                    yield chunk
                return
        except (openai.APIConnectionError, openai.InternalServerError):
            if time.monotonic() > until:
                raise
        headers = {"Last-Event-ID": f"{key}/{count}"}
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=1000)
    args = parser.parse_args()
    with openai.OpenAI(base_url=args.base_url, api_key=args.api_key) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": args.prompt}]
        for chunk in chunks(client, model=model, messages=messages, max_tokens=args.max_tokens):
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
