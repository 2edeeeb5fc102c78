"""Serves the built-in model with two replicas and REST, asks it in every way, and stops it.

Run by `make demo`. Ends with exit code 0 only if every answer came.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence

import mii
from mii import MIIClient, Response

PROMPTS = ["DeepSpeed is", "Seattle is", "The best thing about the sea is", "Two plus two is"]


def heading(text: str) -> None:
    """Print what comes next."""
    print(f"\n--- {text}", flush=True)


def show_speed(responses: Sequence[Response], seconds: float) -> None:
    """Print how fast the new tokens came."""
    tokens = sum(response.generated_length for response in responses)
    print(f"    [{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s]")


def ask_python(client: MIIClient) -> None:
    """One prompt, many prompts, a stream."""
    heading("Python, one prompt: client(prompt)")
    started = time.perf_counter()
    responses = client("The capital of France is", max_new_tokens=24, temperature=0)
    print(f"The capital of France is{responses[0]}")
    show_speed(responses, time.perf_counter() - started)

    heading("Python, many prompts over both replicas: client([...])")
    started = time.perf_counter()
    responses = client(PROMPTS, max_new_tokens=32, seed=7)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        print(f"{prompt}{str(response)!r}")
    show_speed(responses, time.perf_counter() - started)

    heading("Python, streaming: for piece in client.stream(prompt)")
    started = time.perf_counter()
    pieces = []
    for piece in client.stream("Once upon a time", max_new_tokens=48, seed=1):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    show_speed(pieces[-1:], time.perf_counter() - started)


def curl(url: str, body: object) -> object:
    """POST with curl, as a user without Python would; return the answer's JSON."""
    data = json.dumps(body)
    print(f"$ curl -X POST {url} -d '{data}'")
    command = ["curl", "-sS", "--fail-with-body", "-H", "Content-Type: application/json"]
    finished = subprocess.run(
        [*command, "-X", "POST", url, "-d", data], capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        raise SystemExit(f"curl failed: {finished.stderr}{finished.stdout}")
    answer = json.loads(finished.stdout)
    print(json.dumps(answer, indent=2)[:1200])
    return answer


def ask_rest(address: str) -> None:
    """The REST gateway: DeepSpeed-MII's way, and OpenAI's."""
    heading("REST: /generate")
    curl(
        f"http://{address}/generate",
        {"prompts": ["DeepSpeed is"], "max_new_tokens": 24, "temperature": 0},
    )
    heading("REST: /v1/chat/completions")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = curl(
        f"http://{address}/v1/chat/completions",
        {"model": "default", "messages": question, "max_tokens": 24, "temperature": 0},
    )
    assert isinstance(answer, dict)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def main() -> None:
    """Serve, ask, stop."""
    started = time.perf_counter()
    client = mii.serve(
        "smollm2", deployment_name="mii-demo", replica_num=2, enable_rest=True, max_length=2048
    )
    print(f"ready after {time.perf_counter() - started:.1f} s: {client}")
    try:
        ask_python(client)
        ask_rest(client.rest_address)
    finally:
        heading("client.terminate_server()")
        client.terminate_server()
    print("everything is gone")


if __name__ == "__main__":
    main()
