"""Ask a Shardwise server one question through the `openai` client and stream the answer.

python examples/ask.py "Do you deliver on Sunday?" --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse
import time

from openai import OpenAI


def main() -> None:
    """Stream one answer to the terminal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=80)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="not needed", timeout=120)
    model = client.models.list().data[0].id
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            seconds = time.perf_counter() - began
            speed = chunk.usage.completion_tokens / seconds
            print(f"\n({chunk.usage.completion_tokens} tokens, {speed:.1f} tokens/s)")


if __name__ == "__main__":
    main()
