"""The table of options: what a deployment or an engine may be told, once for every surface.

From it come the checks of `mii.options`, and the command line's arguments and their help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mii.option_checks import (
    Anything,
    Boolean,
    Bytes,
    Check,
    Choice,
    Integer,
    Keys,
    Number,
    Numbers,
    Only,
    PowerOfTwo,
    Text,
)

DTYPES = (
    ("auto", "auto"),
    *((s, "float32") for s in ("float32", "fp32", "float", "torch.float32")),
    *((s, "bfloat16") for s in ("bfloat16", "bf16", "torch.bfloat16")),
    *((s, "float16") for s in ("float16", "fp16", "half", "torch.float16")),
)
ROUTING_POLICIES = ("round_robin", "least_outstanding_tokens", "prefix_affinity", "power_of_two")


@dataclass(frozen=True)
class Option:
    """One option. `scope` says whose it is; an ignored one is accepted for compatibility."""

    name: str
    scope: Literal["engine", "deployment", "ignored"]
    check: Check
    doc: str
    aliases: tuple[str, ...] = ()
    shown_default: str = ""


def _engine(name: str, check: Check, doc: str, *aliases: str, default: str = "") -> Option:
    return Option(name, "engine", check, doc, aliases, default)


def _deployment(name: str, check: Check, doc: str, *aliases: str, default: str = "") -> Option:
    return Option(name, "deployment", check, doc, aliases, default)


def _ignored(name: str, check: Check, doc: str) -> Option:
    return Option(name, "ignored", check, doc)


_PORT = Integer(0, 65535, " (0: any free one)")
_NO_DEVICE_MAP = '"auto": CUDA_VISIBLE_DEVICES chooses the devices of this machine'
_ONLY_LOCAL = '"local"; in place of a non-persistent deployment use mii.pipeline()'
_NOT_QUANTISED = "left out: weights are served as they are, not quantised"

OPTIONS: tuple[Option, ...] = (
    _engine(
        "model_name_or_path",
        Text("a model's name on the Hugging Face hub, a folder, or a .gguf file"),
        "the model: a folder, a .gguf file, a name on the Hugging Face hub, or smollm2",
        "model_name",
        "model",
        "path",
    ),
    _engine(
        "tokenizer",
        Text("a folder or a name on the Hugging Face hub"),
        "another tokenizer than the model's own: a folder or a name",
        default="the model's",
    ),
    _engine(
        "dtype",
        Choice(DTYPES),
        "number format of weights and computation: float32, bfloat16, float16",
        "torch_dtype",
        default="auto: the model's own where the machine is fast at it",
    ),
    _engine(
        "device",
        Choice((("auto", "auto"), ("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"))),
        "cpu or cuda",
        default="auto: cuda where there is an NVIDIA GPU",
    ),
    _engine(
        "tensor_parallel",
        Integer(1, 1024),
        "processes that share one copy of the model",
        "tp_size",
        default="$WORLD_SIZE, else 1",
    ),
    _engine(
        "max_length",
        Integer(2),
        "tokens of prompt and answer together, at most",
        default="the model's context, as far as memory allows",
    ),
    _engine(
        "block_size",
        PowerOfTwo(1, 1024),
        "tokens per block of the KV cache",
        default="by device",
    ),
    _engine(
        "num_blocks",
        Integer(1),
        "blocks of the KV cache of each replica",
        default="by memory",
    ),
    _engine(
        "kv_cache_bytes",
        Bytes(),
        "size of each replica's KV cache, in place of num_blocks: 2GiB",
        default="by memory",
    ),
    _engine(
        "gpu_memory_fraction",
        Number(0, 1),
        "share of the GPU's memory for weights and KV cache together",
        default="0.9",
    ),
    _engine(
        "max_ragged_batch_size",
        Integer(1),
        "tokens in one forward pass at most, when it has nothing but prompts",
        default="by device",
    ),
    _engine(
        "token_budget",
        Integer(1),
        "tokens in one forward pass while answers are generated, which wait for it (SplitFuse)",
        default="by device",
    ),
    _engine(
        "max_ragged_sequence_count",
        Integer(1),
        "sequences in one forward pass",
        default="by device",
    ),
    _engine(
        "max_tracked_sequences",
        Integer(1, 2**20),
        "requests that a replica holds, waiting ones included; more are refused",
        default="2048",
    ),
    _engine(
        "prefix_caching",
        Boolean(),
        "keep the KV cache of prompts' beginnings for requests that share them",
        "enable_prefix_caching",
        default="on",
    ),
    _engine(
        "threads",
        Integer(1, 4096),
        "CPU threads of each process",
        "num_threads",
        default="the machine's cores, shared out",
    ),
    _engine(
        "skip_tokenizer",
        Boolean(),
        "load no tokenizer: token ids in, token ids out",
        default="off",
    ),
    _engine(
        "chat_template",
        Text("a Jinja chat template, or a file that holds one", 1_000_000),
        "a Jinja template, or a file that holds one, in place of the model's own",
        default="the model's",
    ),
    _engine(
        "trust_remote_code",
        Boolean(),
        "run Python code that comes with a model's files",
        default="off",
    ),
    _deployment(
        "deployment_name",
        Text("a name", 200),
        "what the deployment is called; mii.client(name) finds it",
        "name",
        default="the model's name with -mii-deployment",
    ),
    _deployment(
        "replica_num",
        Integer(1, 1024),
        "copies of the model, between which requests are balanced",
        "replicas",
        default="1",
    ),
    _deployment(
        "host",
        Text("a host name or an IP address of this machine", 255),
        "address to listen on: localhost, 0.0.0.0, ::1, ...",
        default="localhost",
    ),
    _deployment(
        "port",
        _PORT,
        "gRPC port of the router",
        "port_number",
        default="50050, or a free one if that is taken",
    ),
    _deployment(
        "enable_rest",
        Boolean(),
        "answer HTTP too: /generate, /v1/chat/completions, ...",
        "enable_restful_api",
        default="off",
    ),
    _deployment(
        "rest_host",
        Text("a host name or an IP address of this machine", 255),
        "address that HTTP listens on",
        "restful_api_host",
        default="as host",
    ),
    _deployment(
        "rest_port",
        _PORT,
        "HTTP port",
        "restful_api_port",
        default="28080, or a free one if that is taken",
    ),
    _deployment(
        "startup_timeout",
        Number(0, 1e6),
        "seconds without progress after which a start counts as failed",
        default="600",
    ),
    _deployment(
        "routing_policy",
        Choice(tuple((policy, policy) for policy in ROUTING_POLICIES)),
        "how a replica is chosen: " + ", ".join(ROUTING_POLICIES),
        default="round_robin",
    ),
    _deployment(
        "replica_weights",
        Numbers(),
        "how much of the work each replica gets beside the others",
        default="all the same",
    ),
    _deployment(
        "max_requests",
        Integer(1),
        "requests that are answered at one time; more are refused with a time to try again",
        default="2048",
    ),
    _deployment(
        "max_queued_tokens",
        Integer(1),
        "tokens of their prompts and answers still to be computed, estimated; beyond: refused",
        default="4000000",
    ),
    _deployment(
        "api_keys",
        Keys(),
        "keys of which clients must show one: a list, or a file with one on each line",
        default="none: whoever reaches the port may ask",
    ),
    _deployment(
        "admin_keys",
        Keys(),
        "keys for calls that change the deployment: Terminate, Restart, Scale",
        default="any of api_keys",
    ),
    _deployment(
        "tls_certificate",
        Text("a PEM file", 4096),
        "certificate for TLS on both ports, a PEM file",
        default="no TLS",
    ),
    _deployment("tls_key", Text("a PEM file", 4096), "its private key, a PEM file"),
    _deployment(
        "tls_client_ca",
        Text("a PEM file", 4096),
        "authorities, a PEM file: clients must show a certificate of one of them",
        default="clients need no certificate",
    ),
    _deployment(
        "allow_open_access",
        Boolean(),
        "listen to other machines without api_keys: whoever reaches the port may ask",
        default="off",
    ),
    _deployment(
        "max_restarts",
        Integer(0, 1000),
        "times in a row that a replica which dies is started again; 0: never",
        default="5",
    ),
    _deployment(
        "log_format",
        Choice((("text", "text"), ("json", "json"))),
        "how log lines are written: text, or json, an object for each",
        default="text",
    ),
    _deployment(
        "log_level",
        Choice(tuple((level, level) for level in ("debug", "info", "warning", "error"))),
        "what is logged at least: debug, info, warning, error",
        default="info",
    ),
    _deployment(
        "access_log",
        Boolean(),
        "log a line for each request that has ended",
        default="on",
    ),
    _ignored("task", Only(("text-generation",), '"text-generation"'), "the only task there is"),
    _ignored("deployment_type", Only(("local",), _ONLY_LOCAL), "deployments are local"),
    _ignored("device_map", Only((), _NO_DEVICE_MAP), "devices are shared out in order"),
    _ignored("quantization_mode", Only((), _NOT_QUANTISED), "weights are served as they are"),
    _ignored("offload", Only(("false",), "False"), "the KV cache stays on its device"),
    _ignored("restful_processes", Integer(1), "one process serves all HTTP connections"),
    _ignored("torch_dist_port", Integer(0, 65535), "ranks are connected without ports"),
    _ignored("zmq_port_number", Integer(0, 65535), "ranks are connected without ports"),
    _ignored("hostfile", Anything(), "all replicas start on this machine"),
    _ignored("sync_debug", Boolean(), "each step is synchronised where it has to be"),
    _ignored("profile_model_time", Boolean(), "every answer carries its times"),
    _ignored("all_rank_output", Boolean(), "the process that asks gets the answer"),
    _ignored("version", Anything(), "deployments are local"),
    _ignored("instance_type", Anything(), "deployments are local"),
    _ignored("max_context", Integer(1), "max_length limits the context"),
    _ignored("debug_level", Anything(), "the logging module decides what is shown"),
)

OPTION_NAMES = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}
