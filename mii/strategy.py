"""The strategy engine: model, machine and load to a plan, with its reasons.

It fills in every size of an EngineConfig that the user left open, and refuses what cannot work, so
far as that can be known before anything is started. It holds no torch: a GPU's blocks are counted
later, by the worker, which measures the memory of its largest step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mii.config import DeploymentConfig, EngineConfig
from mii.errors import DeploymentError, InvalidArgument, ModelError
from mii.machine import GPU, Machine
from mii.models.checkpoint import inspect
from mii.parallel.sharding import check_degree, shard_heads

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BY_DEVICE = {
    # Tokens per step: larger steps compute prompts a little faster. While answers are generated
    # they wait for each step: about half a second for 135M parameters on two cores, and less than
    # 40 ms for 8B on an H200.
    "max_ragged_batch_size": {"cpu": 512, "cuda": 2048},
    "token_budget": {"cpu": 256, "cuda": 1024},
    "max_ragged_sequence_count": {"cpu": 128, "cuda": 256},
    "block_size": {"cpu": 32, "cuda": 64},
}
_PROCESS_BYTES = 500 << 20  # a worker before it has a model: Python, torch, transformers
_WEIGHTS_FACTOR = 1.2  # copies while weights are packed
_USABLE = 0.9  # of the available memory
_ENOUGH_TOKENS = 32768  # that a CPU computes in minutes: more cache would hardly be of use
_LEAST_TOKENS = 2048  # that a KV cache must hold, unless the context is shorter


@dataclass(frozen=True)
class ModelFacts:
    """What of a model decides what it needs."""

    model_type: str
    dtype: str | None  # that config.json names
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int | None  # prompt and answer, as the model was made for
    tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelFacts:
        """Read the content of config.json.

        Raises:
            ModelError: if a size is missing or no positive integer.
        """
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        optional = {"num_key_value_heads": heads, "head_dim": hidden // heads}
        sizes = {
            name: _size(config, name) if config.get(name) else default
            for name, default in optional.items()
        }
        given = config.get("max_position_embeddings")
        dtype = config.get("dtype") or config.get("torch_dtype")
        return ModelFacts(
            model_type=str(config.get("model_type")),
            dtype=dtype if dtype in DTYPE_BYTES else None,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            heads=heads,
            kv_heads=sizes["num_key_value_heads"],
            head_dim=sizes["head_dim"],
            context=None if given is None else _size(config, "max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; each rank holds all of it."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters in all, norms and biases not counted."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.embedding_parameters * (1 if self.tied else 2)

    def weight_bytes(self, dtype: str, ranks: int) -> int:
        """Return what one replica's weights take, over all its ranks."""
        count = self.parameters + (ranks - 1) * self.embedding_parameters
        return count * DTYPE_BYTES[dtype]

    def cache_bytes_per_token(self, dtype: str, ranks: int) -> int:
        """Return what one token takes in one replica's KV cache, over all its ranks."""
        heads = sum(
            len(shard_heads(self.heads, self.kv_heads, rank, ranks).kv_heads)
            for rank in range(ranks)
        )
        return 2 * self.layers * heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Decision:
    """One thing that was decided, for people."""

    what: str
    value: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What will be started. `engine` has no open sizes, but for a GPU's `num_blocks`."""

    engine: EngineConfig
    devices: tuple[str, ...]  # GPUs for CUDA_VISIBLE_DEVICES, in the order replicas take them
    decisions: tuple[Decision, ...]


def plan_deployment(config: DeploymentConfig, machine: Machine) -> tuple[DeploymentConfig, Plan]:
    """Judge the model's folder, plan its replicas, and return the configuration to start.

    Raises:
        ModelError, InvalidArgument, DeploymentError: for what cannot work.
    """
    plan = plan_engine(config.engine, inspect_model(config.engine), machine, config.replica_num)
    return replace(config, engine=plan.engine, devices=plan.devices), plan


def inspect_model(engine: EngineConfig) -> ModelFacts:
    """Judge the folders of model and tokenizer, and return what of the model decides its needs.

    Raises:
        ModelError: naming the file that is missing or damaged.
    """
    tokenizer = None if engine.skip_tokenizer else Path(engine.tokenizer_path)
    return ModelFacts.of(inspect(Path(engine.model_path), tokenizer=tokenizer))


def plan_engine(
    engine: EngineConfig, model: ModelFacts, machine: Machine, replicas: int = 1
) -> Plan:
    """Decide everything that `engine` leaves open.

    Args:
        engine: what the user asked for; what is given stays as it is.
        model: the model's facts.
        machine: where it will run.
        replicas: of the same engine on this machine.

    Raises:
        InvalidArgument: if what was asked for cannot work with this model or machine.
        DeploymentError: if the machine has too little memory.
    """
    return _Planner(engine, model, machine, replicas).plan()


class _Planner:
    """Makes one plan: each method settles one thing and says why."""

    def __init__(
        self, engine: EngineConfig, model: ModelFacts, machine: Machine, replicas: int
    ) -> None:
        self._engine = engine
        self._model = model
        self._machine = machine
        self._replicas = replicas
        self._decisions: list[Decision] = []
        self._devices: tuple[str, ...] = ()

    def plan(self) -> Plan:
        check_degree(self._model.heads, self._engine.tensor_parallel)
        self._device()
        self._dtype()
        self._threads()
        self._step()
        self._decide_size("block_size", "block size", "{} tokens", "by device")
        self._cache()
        self._max_length()
        return Plan(self._engine, self._devices, tuple(self._decisions))

    def _set(self, what: str, shown: str, why: str, **values: Any) -> None:
        """Settle fields, unless the user did."""
        self._engine = replace(self._engine, **values)
        self._decisions.append(Decision(what, shown, why))

    def _device(self) -> None:
        asked, machine = self._engine.device, self._machine
        if asked == "cuda" and not machine.gpus:
            raise InvalidArgument.of("device", asked, f"cpu: {machine.no_gpu_reason}")
        if asked == "cpu" or not machine.gpus:
            why = "as asked" if asked == "cpu" else machine.no_gpu_reason
            self._set("device", f"cpu, {machine.cores} cores", why, device="cpu")
            return
        self._devices = tuple(gpu.device for gpu in machine.gpus)
        self._check_gpus(machine.gpus)
        name = machine.gpus[0].name
        self._set(
            "device",
            f"cuda: {name}",
            "as asked" if asked == "cuda" else "it is here",
            device="cuda",
        )

    def _check_gpus(self, gpus: tuple[GPU, ...]) -> None:
        ranks, replicas, have = self._engine.tensor_parallel, self._replicas, len(gpus)
        if ranks > have:
            raise InvalidArgument.of(
                "tensor_parallel", ranks, f"at most {have}, the GPUs that can be used here"
            )
        replicas_per_gpu = -(-replicas // (have // ranks))
        if replicas_per_gpu * self._engine.gpu_memory_fraction > 1:
            raise InvalidArgument(
                f"replica_num = {replicas} with tensor_parallel = {ranks} takes "
                f"{replicas * ranks} GPUs, and {have} can be used here: ask for "
                f"{have // ranks} replicas, or let {replicas_per_gpu} share a GPU with "
                f"gpu_memory_fraction={0.9 / replicas_per_gpu:.2f}",
                "replica_num",
            )

    def _dtype(self) -> None:
        engine, stored = self._engine, self._model.dtype
        if engine.dtype != "auto":
            self._set("dtype", engine.dtype, "as asked")
        elif engine.device == "cuda":
            dtype = stored or "bfloat16"
            why = "as config.json says" if stored else "config.json names none"
            self._set("dtype", dtype, why, dtype=dtype)
        elif self._machine.fast_bfloat16 and stored == "bfloat16":
            why = "as config.json says, and this CPU computes with it in hardware"
            self._set("dtype", "bfloat16", why, dtype="bfloat16")
        else:
            why = "the only format that CPUs without bfloat16 in hardware are fast at"
            if self._machine.fast_bfloat16:
                why = f"config.json names {stored or 'none'}"
            self._set("dtype", "float32", why, dtype="float32")

    def _threads(self) -> None:
        if self._engine.threads is not None:
            self._set("threads", f"{self._engine.threads} per process", "as asked")
            return
        processes = self._replicas * self._engine.tensor_parallel
        threads = max(1, self._machine.cores // processes)
        why = f"{self._machine.cores} cores for {processes} worker process"
        self._set(
            "threads",
            f"{threads} per process",
            why + ("es" if processes > 1 else ""),
            threads=threads,
        )

    def _step(self) -> None:
        """Decide tokens and sequences per step, of which each sequence takes at least one token."""
        tokens, budget = self._engine.max_ragged_batch_size, self._engine.token_budget
        sequences = self._engine.max_ragged_sequence_count
        limits = [self._engine.max_tracked_sequences, *(each for each in (tokens, budget) if each)]
        if sequences is not None and sequences > min(limits):
            raise InvalidArgument.of(
                "max_ragged_sequence_count",
                sequences,
                f"at most {min(limits)}, as max_tracked_sequences, max_ragged_batch_size and "
                "token_budget say",
            )
        asked = tokens is not None or budget is not None
        if tokens is None:
            default = _BY_DEVICE["max_ragged_batch_size"][self._engine.device]
            tokens = max(default, sequences or 0, budget or 0)
        if budget is None:
            default = _BY_DEVICE["token_budget"][self._engine.device]
            budget = max(default, sequences or 0)
        budget = min(budget, tokens)
        self._set(
            "token budget",
            f"{budget} tokens per step, {tokens} while nothing is generated",
            "as asked" if asked else "by device",
            max_ragged_batch_size=tokens,
            token_budget=budget,
        )
        if sequences is None:
            default = _BY_DEVICE["max_ragged_sequence_count"][self._engine.device]
            sequences = min(default, budget, self._engine.max_tracked_sequences)
            self._set(
                "sequences",
                f"{sequences} per step",
                "by device",
                max_ragged_sequence_count=sequences,
            )
        else:
            self._set("sequences", f"{sequences} per step", "as asked")

    def _decide_size(self, field: str, what: str, shown: str, why: str) -> None:
        asked = getattr(self._engine, field)
        value = asked if asked is not None else _BY_DEVICE[field][self._engine.device]
        why = why if asked is None else "as asked"
        self._set(what, shown.format(value), why, **{field: value})

    def _cache(self) -> None:
        """Decide the number of blocks of the KV cache."""
        engine, model = self._engine, self._model
        assert engine.block_size is not None
        ranks = engine.tensor_parallel
        weights = model.weight_bytes(engine.dtype, ranks)
        self._set(
            "weights",
            f"{_size_text(weights)} per replica",
            f"{model.parameters / 1e6:.0f}M parameters in {engine.dtype}",
        )
        block_bytes = model.cache_bytes_per_token(engine.dtype, ranks) * engine.block_size
        if engine.num_blocks is not None:
            blocks, why = engine.num_blocks, "as asked"
        elif engine.kv_cache_bytes is not None:
            blocks, why = engine.kv_cache_bytes // block_bytes, "kv_cache_bytes as asked"
            if blocks == 0:
                raise InvalidArgument.of(
                    "kv_cache_bytes",
                    engine.kv_cache_bytes,
                    f"at least {block_bytes}, the size of one block",
                )
        elif engine.device == "cuda":
            self._set(
                "KV cache",
                "what the GPU has left",
                "measured once the model is loaded: "
                f"gpu_memory_fraction is {engine.gpu_memory_fraction:g}",
            )
            return
        else:
            blocks, why = self._blocks_by_memory(weights, block_bytes)
        if engine.device == "cpu":
            self._check_fits(blocks * block_bytes)
        tokens = blocks * engine.block_size
        shown = f"{blocks} blocks = {tokens} tokens, {_size_text(blocks * block_bytes)} per replica"
        self._set("KV cache", shown, why, num_blocks=blocks)

    def _check_fits(self, cache_bytes: int) -> None:
        """Refuse a KV cache beyond the machine's memory, whose pages are taken as they are used."""
        engine, most = self._engine, self._machine.memory_bytes // self._replicas
        if cache_bytes <= most:
            return
        field = "num_blocks" if engine.num_blocks is not None else "kv_cache_bytes"
        replicas = f" for each of {self._replicas} replicas" if self._replicas > 1 else ""
        raise InvalidArgument(
            f"{field} = {getattr(engine, field)} asks for a KV cache of "
            f"{_size_text(cache_bytes)}{replicas}: at most {_size_text(most)} are free here",
            field,
        )

    def _blocks_by_memory(self, weights: int, block_bytes: int) -> tuple[int, str]:
        """Give the cache what is of use, up to a quarter of the memory that the weights leave."""
        engine, context, replicas = self._engine, self._model.context, self._replicas
        assert engine.block_size is not None and engine.max_ragged_sequence_count is not None
        fixed = int(weights * _WEIGHTS_FACTOR) + engine.tensor_parallel * _PROCESS_BYTES
        room = int(self._machine.memory_bytes * _USABLE) // replicas - fixed
        wanted = engine.max_length or context or _LEAST_TOKENS
        least = -(-min(wanted, _LEAST_TOKENS) // engine.block_size)
        if room < least * block_bytes:
            needed = replicas * (fixed + least * block_bytes)
            raise DeploymentError(
                f"there is too little memory: {replicas} x {engine.model_name} in {engine.dtype} "
                f"takes about {_size_text(needed)}, and {_size_text(self._machine.memory_bytes)} "
                "are free; use fewer replicas, a smaller model or a 16-bit dtype, or set "
                "kv_cache_bytes to start regardless"
            )
        one_context = -(-wanted // engine.block_size)
        most = max(one_context, -(-_ENOUGH_TOKENS // engine.block_size))
        useful = min(most, engine.max_ragged_sequence_count * one_context)
        quarter, half = (room // part // block_bytes for part in (4, 2))
        if useful <= quarter:
            return useful, "as many tokens as a CPU computes in minutes, or one full context"
        if one_context > quarter and one_context <= half:
            return one_context, "holds one sequence of full length"
        return max(least, quarter), "a quarter of the memory that the weights leave"

    def _max_length(self) -> None:
        engine, context = self._engine, self._model.context
        blocks, block_size = engine.num_blocks, engine.block_size
        assert block_size is not None
        pool = blocks * block_size if blocks is not None else None
        asked = engine.max_length
        if asked is not None:
            if context is not None and asked > context:
                raise InvalidArgument.of("max_length", asked, f"at most the model's {context}")
            if pool is not None and asked > pool:
                raise InvalidArgument(
                    f"max_length = {asked} does not fit the KV cache, which holds {pool} tokens "
                    f"({blocks} blocks of {block_size}): lower max_length, or raise num_blocks to "
                    f"{-(-asked // block_size)}",
                    "max_length",
                )
            self._set("max length", f"{asked} tokens", "as asked")
            return
        known = [size for size in (context, pool) if size is not None]
        length = min(known) if known else None
        if length is None:
            raise ModelError("config.json has no max_position_embeddings: give max_length")
        why = "the model's context" if length == context else "what the KV cache holds"
        self._set("max length", f"{length} tokens", why, max_length=length)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {name} = {value!r}: a positive integer was expected")
    return value


def _size_text(count: int) -> str:
    """Return an amount of memory for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
