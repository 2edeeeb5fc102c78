"""The deployment's frozen configuration.

`EngineConfig` is what an engine is made of; `DeploymentConfig` is what `mii.serve` starts. Both are
plain frozen dataclasses that cross process boundaries as JSON. Users' spellings, aliases included,
are turned into them once, at the edge, by `mii.options`; nothing behind it reads the environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

DEFAULT_PORT = 50050
DEFAULT_REST_PORT = 28080


@dataclass(frozen=True)
class EngineConfig:
    """One replica's engine. `None` means: chosen by `mii.strategy` from model and machine."""

    model_path: str  # absolute path of a folder in Hugging Face form
    tokenizer_path: str  # the same, unless another tokenizer was asked for
    model_name: str  # what users call the model
    dtype: str = "auto"  # float32, bfloat16, float16; auto follows config.json and the machine
    device: str = "auto"  # cpu or cuda; auto takes cuda where there is one
    tensor_parallel: int = 1
    max_length: int | None = None  # prompt + new tokens; None: the model's context
    block_size: int | None = None  # tokens per block of the KV cache
    num_blocks: int | None = None  # blocks of the KV cache
    kv_cache_bytes: int | None = None  # in place of num_blocks
    gpu_memory_fraction: float = 0.9  # of the device, for weights and KV cache together
    max_ragged_batch_size: int | None = None  # tokens of a step at most: of prompts alone
    token_budget: int | None = None  # tokens of a step in which sequences decode: SplitFuse's
    max_ragged_sequence_count: int | None = None  # sequences per step
    max_tracked_sequences: int = 2048  # sequences known to the engine, waiting ones included
    prefix_caching: bool = True
    threads: int | None = None  # CPU threads of each rank
    skip_tokenizer: bool = False  # ids in, ids out
    chat_template: str | None = None  # in place of the model's own
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DeploymentConfig:
    """What `mii.serve` starts: replicas of one engine behind a router."""

    deployment_name: str
    engine: EngineConfig
    replica_num: int = 1
    host: str = "localhost"  # where the router listens
    port: int = DEFAULT_PORT
    port_is_default: bool = False  # not asked for: another free port will do if it is taken
    enable_rest: bool = False
    rest_host: str = "localhost"
    rest_port: int = DEFAULT_REST_PORT
    rest_port_is_default: bool = False
    startup_timeout: float = 600.0  # seconds without progress until a start counts as failed
    routing_policy: str = "round_robin"
    replica_weights: tuple[float, ...] = ()  # by replica, how much of the work each gets; else 1
    max_requests: int = 2048  # that the router answers at one time
    max_queued_tokens: int = 4_000_000  # of their prompts and answers still to be computed
    api_keys: tuple[str, ...] = ()  # digests of the keys that clients need; (): they need none
    admin_keys: tuple[str, ...] = ()  # digests of the keys for calls that change the deployment
    tls_certificate: str | None = None  # PEM file; None: no TLS
    tls_key: str | None = None
    tls_client_ca: str | None = None  # PEM file: clients show a certificate of these authorities
    tls_name: str = ""  # a host name that the certificate is for
    allow_open_access: bool = False  # without a key from other machines
    token: str = ""  # shown by the deployment's own processes, and by its user's programs
    max_restarts: int = 5  # in a row, of a replica that keeps dying; 0: none is started again
    log_format: str = "text"  # or "json"
    log_level: str = "info"
    access_log: bool = True  # a line for each request
    cache_path: str = ""  # folder of models, registry and logs
    devices: tuple[str, ...] = ()  # GPUs as CUDA_VISIBLE_DEVICES names them; replicas share them

    def to_json(self) -> str:
        """Encode for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> DeploymentConfig:
        """Decode what `to_json` gave."""
        values: dict[str, Any] = json.loads(text)
        values["engine"] = EngineConfig(**values["engine"])
        values["devices"] = tuple(values["devices"])
        for name in ("replica_weights", "api_keys", "admin_keys"):
            values[name] = tuple(values[name])
        return DeploymentConfig(**values)
