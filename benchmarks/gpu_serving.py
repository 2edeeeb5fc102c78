"""The served path on a GPU: `mii.serve()` of a random model of Llama-3.1-8B's shape, under load.

    python -m benchmarks.gpu_serving [--folder DIR] [--streams 256] [--requests 1024] [--json FILE]

Closed loop over /v1/completions with prompts of token ids: so many streams, each asks again when
its answer has ended; client processes of their own. 512 tokens in, 256 out, greedy, end of sequence
ignored. Beside it vLLM 0.26's figures for the same load on such a card.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 128256
# Output tokens/s, p50 time to first token, p99 gap between two tokens, seconds until ready.
VLLM = {"out_tokens_per_s": 9040, "ttft_p50_ms": 1345, "gap_p99_ms": 189, "ready_s": 117}


def make_model(folder: Path) -> None:
    """Write a checkpoint of random weights in Hugging Face form, unless it is there."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, layers, kv = 4096, 14336, 32, 1024
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"],
        rope_theta=500000.0, bos_token_id=128000, eos_token_id=128001,
    ).save_pretrained(folder)  # fmt: skip

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()

    index: dict[str, str] = {}
    ends = {
        "model.embed_tokens.weight": weight(VOCAB, hidden),
        "lm_head.weight": weight(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shards = {"ends.safetensors": ends}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shards[f"layer-{layer}.safetensors"] = {
            f"{name}self_attn.q_proj.weight": weight(hidden, hidden),
            f"{name}self_attn.k_proj.weight": weight(kv, hidden),
            f"{name}self_attn.v_proj.weight": weight(kv, hidden),
            f"{name}self_attn.o_proj.weight": weight(hidden, hidden),
            f"{name}mlp.gate_proj.weight": weight(inner, hidden),
            f"{name}mlp.up_proj.weight": weight(inner, hidden),
            f"{name}mlp.down_proj.weight": weight(hidden, inner),
            f"{name}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{number}" for number in range(VOCAB - len(letters)))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@dataclass
class Answer:
    """What one stream saw of one request, in seconds."""

    first: float  # until the first token
    gaps: list[float]  # between events with text


async def _ask(session: Any, url: str, prompt: list[int], new: int) -> Answer:
    body = {
        "model": "default", "prompt": prompt, "max_tokens": new, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    began = time.perf_counter()
    times = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return Answer(times[0] - began, [b - a for a, b in zip(times, times[1:], strict=False)])


def _client(url: str, streams: int, requests: int, seed: int, queue: Any) -> None:
    import aiohttp

    rng = random.Random(seed)
    prompts = iter([[rng.randrange(300, VOCAB) for _ in range(512)] for _ in range(requests)])

    async def run() -> None:
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            answers: list[Answer] = []

            async def stream() -> None:
                for prompt in prompts:
                    answers.append(await _ask(session, url, prompt, 256))

            began = time.perf_counter()
            await asyncio.gather(*(stream() for _ in range(streams)))
            queue.put((began, time.perf_counter(), answers))

    asyncio.run(run())


def load(url: str, streams: int, requests: int, processes: int) -> dict[str, float]:
    """Run the load; return what it showed."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    clients = [
        context.Process(
            target=_client, args=(url, streams // processes, requests // processes, seed, queue)
        )
        for seed in range(processes)
    ]
    for client in clients:
        client.start()
    results = [queue.get(timeout=600) for _ in clients]
    for client in clients:
        client.join()
    answers = [answer for _, _, some in results for answer in some]
    seconds = max(end for _, end, _ in results) - min(begin for begin, _, _ in results)
    firsts = sorted(answer.first for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    return {
        "streams": streams,
        "requests": len(answers),
        "seconds": seconds,
        "out_tokens_per_s": len(answers) * 256 / seconds,
        "ttft_p50_ms": firsts[len(firsts) // 2] * 1e3,
        "ttft_p99_ms": firsts[int(len(firsts) * 0.99)] * 1e3,
        "gap_p50_ms": gaps[len(gaps) // 2] * 1e3,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "gap_max_ms": gaps[-1] * 1e3,
    }


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mii-random-8b"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--budget", type=int, help="tokens of a step that decodes; left out: mii's choice"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import mii

    began = time.perf_counter()
    make_model(options.folder)
    print(f"checkpoint after {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    client = mii.serve(
        str(options.folder), port=0, enable_rest=True, rest_port=0, max_length=8192,
        prefix_caching=False,
        **({"token_budget": options.budget} if options.budget else {}),
    )  # fmt: skip
    ready = time.perf_counter() - began
    print(f"ready after {ready:.1f} s (vLLM {VLLM['ready_s']})", flush=True)
    found: dict[str, Any] = {"ready_s": ready, "vllm": VLLM}
    try:
        url = f"http://{client.rest_address}"
        load(url, 8, 8, 1)
        found["alone"] = load(url, 1, 6, 1)
        found["loaded"] = load(url, options.streams, options.requests, options.processes)
    finally:
        client.terminate_server()
    for name in ("alone", "loaded"):
        print(name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
    print("vLLM, loaded:", VLLM)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
