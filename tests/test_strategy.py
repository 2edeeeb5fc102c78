"""Model, machine and load to a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii.config import DeploymentConfig, EngineConfig
from mii.errors import DeploymentError, InvalidArgument, MIIError, ModelError
from mii.launchers.local import devices_of
from mii.machine import GPU, Machine, visible_gpus
from mii.strategy import ModelFacts, Plan, plan_deployment, plan_engine

GB = 10**9
SMOLLM2 = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LAPTOP = Machine(cores=8, memory_bytes=16 * GB, fast_bfloat16=False)
SERVER = replace(LAPTOP, fast_bfloat16=True)
SMALL = replace(LAPTOP, cores=2)
TWO_GPUS = replace(LAPTOP, gpus=(GPU("GPU-a", "H200", 141 * GB), GPU("GPU-b", "H200", 141 * GB)))
FOUR_GPUS = replace(LAPTOP, gpus=tuple(GPU(str(n), "H200", 141 * GB) for n in range(4)))


def engine(**values: Any) -> EngineConfig:
    return EngineConfig(model_path="/m", tokenizer_path="/m", model_name="smollm2", **values)


def plan(
    machine: Machine = LAPTOP, replicas: int = 1, facts: dict[str, Any] | None = None, **values: Any
) -> Plan:
    model = ModelFacts.of({**SMOLLM2, **(facts or {})})
    return plan_engine(engine(**values), model, machine, replicas)


def why(plan: Plan, what: str) -> str:
    return next(decision.why for decision in plan.decisions if decision.what == what)


def test_facts_of_a_model() -> None:
    model = ModelFacts.of(SMOLLM2)
    assert model.parameters == 134_479_872  # 134,515,008 of the checkpoint, less its 61 norms
    assert model.head_dim == 64
    assert model.weight_bytes("float32", 1) == 4 * model.parameters
    assert model.cache_bytes_per_token("float32", 1) == 30 * 2 * 3 * 64 * 4
    # Two ranks both hold the embedding, and both need the middle one of three key/value heads.
    assert model.weight_bytes("bfloat16", 2) == 2 * (model.parameters + 49152 * 576)
    assert model.cache_bytes_per_token("float32", 2) == 30 * 2 * 4 * 64 * 4


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, TWO_GPUS])
def test_nothing_is_left_open(machine: Machine) -> None:
    chosen = plan(machine).engine
    open_fields = {f.name for f in fields(chosen) if getattr(chosen, f.name) is None}
    assert open_fields - {"chat_template", "kv_cache_bytes"} == (
        {"num_blocks"} if machine.gpus else set()  # measured by the worker
    )
    assert chosen.device in ("cpu", "cuda") and chosen.dtype != "auto"


@pytest.mark.parametrize(
    ("machine", "stored", "dtype"),
    [
        (LAPTOP, "bfloat16", "float32"),
        (LAPTOP, "float32", "float32"),
        (SERVER, "bfloat16", "bfloat16"),
        (SERVER, "float32", "float32"),
        (SERVER, None, "float32"),
        (TWO_GPUS, "float16", "float16"),
        (TWO_GPUS, "float32", "float32"),
        (TWO_GPUS, None, "bfloat16"),
    ],
)
def test_the_dtype_follows_the_model_where_the_machine_is_fast_at_it(
    machine: Machine, stored: str | None, dtype: str
) -> None:
    assert plan(machine, facts={"dtype": stored}).engine.dtype == dtype
    assert plan(machine, facts={"dtype": None, "torch_dtype": stored}).engine.dtype == dtype
    assert plan(machine, facts={"dtype": stored}, dtype="float16").engine.dtype == "float16"


def test_cores_are_shared_out() -> None:
    assert plan().engine.threads == 8
    assert plan(replicas=2, tensor_parallel=2).engine.threads == 2
    assert plan(SMALL, replicas=3).engine.threads == 1
    assert plan(threads=3).engine.threads == 3


def test_what_was_asked_for_stays() -> None:
    asked = {
        "dtype": "bfloat16",
        "block_size": 8,
        "num_blocks": 100,
        "threads": 3,
        "max_length": 700,
        "max_ragged_batch_size": 50,
        "max_ragged_sequence_count": 5,
    }
    chosen = plan(**asked)
    assert {name: getattr(chosen.engine, name) for name in asked} == asked
    for what in ("dtype", "block size", "KV cache", "threads", "max length", "token budget"):
        assert why(chosen, what) == "as asked"


def test_blocks_take_a_share_of_the_memory_whatever_the_number_of_replicas() -> None:
    sizes = []
    for replicas in (4, 6, 8):
        chosen = plan(replicas=replicas).engine
        assert chosen.num_blocks is not None and chosen.block_size is not None
        per_token = ModelFacts.of(SMOLLM2).cache_bytes_per_token("float32", 1)
        sizes.append(replicas * chosen.num_blocks * chosen.block_size * per_token)
    assert all(size <= 4 * GB for size in sizes)
    assert sizes == sorted(sizes, reverse=True)  # weights take more, the cache less


def test_a_small_model_gets_no_more_cache_than_it_can_use() -> None:
    chosen = plan(facts={"max_position_embeddings": 128}).engine
    assert chosen.num_blocks == 128 * 128 // 32  # sequences of a step, of full length
    assert plan().engine.num_blocks == 32768 // 32


def test_one_full_context_is_worth_half_the_memory() -> None:
    facts = {"max_position_embeddings": 131072}
    chosen = plan(facts=facts).engine
    assert chosen.num_blocks == 131072 // 32 and chosen.max_length == 131072


def test_a_context_that_memory_cannot_hold_is_shortened_and_the_plan_says_so() -> None:
    chosen = plan(facts={"max_position_embeddings": 10**6})
    assert chosen.engine.num_blocks is not None and chosen.engine.block_size is not None
    assert chosen.engine.max_length == chosen.engine.num_blocks * chosen.engine.block_size
    assert why(chosen, "max length") == "what the KV cache holds"


def test_sequences_never_exceed_tokens_of_a_step() -> None:
    assert plan(max_ragged_batch_size=16).engine.max_ragged_sequence_count == 16
    assert plan(max_ragged_sequence_count=500).engine.token_budget == 500
    assert plan(max_tracked_sequences=9).engine.max_ragged_sequence_count == 9


@pytest.mark.parametrize(
    ("machine", "values", "field", "words"),
    [
        (LAPTOP, {"tensor_parallel": 10}, "tensor_parallel", "9 attention heads"),
        (LAPTOP, {"device": "cuda"}, "device", "there is no NVIDIA GPU"),
        (LAPTOP, {"max_length": 8193}, "max_length", "8192"),
        (LAPTOP, {"max_length": 100, "num_blocks": 3}, "max_length", "96 tokens"),
        (LAPTOP, {"kv_cache_bytes": 10}, "kv_cache_bytes", "one block"),
        (LAPTOP, {"kv_cache_bytes": 17 * GB}, "kv_cache_bytes", r"at most 16\.0 GB"),
        (LAPTOP, {"num_blocks": 10**6}, "num_blocks", r"at most 16\.0 GB"),
        (
            LAPTOP,
            {"max_ragged_sequence_count": 9, "max_ragged_batch_size": 8},
            "max_ragged_sequence_count",
            "at most 8",
        ),
        (TWO_GPUS, {"tensor_parallel": 3}, "tensor_parallel", "at most 2"),
    ],
)
def test_what_cannot_be_is_refused(
    machine: Machine, values: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        plan(machine, **values)
    assert caught.value.field == field


def test_too_little_memory_says_how_much_it_takes() -> None:
    tiny = replace(LAPTOP, memory_bytes=1 * GB)
    with pytest.raises(DeploymentError, match=r"takes about 2\.\d GB, and 1\.0 GB are free"):
        plan(tiny, replicas=2)
    assert plan(tiny, replicas=2, kv_cache_bytes=10**8).engine.num_blocks  # the user knows better


def test_replicas_share_gpus_only_when_told_to() -> None:
    assert plan(TWO_GPUS, replicas=2).devices == ("GPU-a", "GPU-b")
    with pytest.raises(InvalidArgument, match=r"gpu_memory_fraction=0\.45"):
        plan(TWO_GPUS, replicas=3)
    plan(TWO_GPUS, replicas=4, gpu_memory_fraction=0.45)
    assert plan(TWO_GPUS, device="cpu").devices == ()


def test_each_replica_gets_its_own_gpus() -> None:
    devices = plan(FOUR_GPUS, replicas=2, tensor_parallel=2).devices
    config = DeploymentConfig(
        deployment_name="d", engine=engine(tensor_parallel=2), devices=devices
    )
    assert [devices_of(config, replica) for replica in range(3)] == [
        ("0", "1"),
        ("2", "3"),
        ("0", "1"),
    ]
    assert devices_of(replace(config, devices=()), 0) == ()


LISTING = "0, GPU-aa, NVIDIA H200, 143771\n1, GPU-bb, NVIDIA H200, 143771\n"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["GPU-aa", "GPU-bb"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-bb", ["GPU-bb"]),
        ("0,7,1", ["0"]),
        ("7", []),
        ("MIG-x", ["MIG-x"]),
    ],
)
def test_cuda_visible_devices_is_honoured(visible: str | None, devices: list[str]) -> None:
    assert [gpu.device for gpu in visible_gpus(LISTING, visible)] == devices


@pytest.mark.parametrize(
    "facts",
    [
        {"hidden_size": None},
        {"num_attention_heads": "9"},
        {"vocab_size": -1},
        {"max_position_embeddings": 0},
    ],
)
def test_a_config_without_its_sizes_is_named(facts: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(facts))):
        ModelFacts.of({**SMOLLM2, **facts})


sizes = st.none() | st.integers(1, 300)


@given(
    machine=st.sampled_from([LAPTOP, SERVER, TWO_GPUS]),
    replicas=st.integers(1, 4),
    values=st.fixed_dictionaries(
        {
            "tensor_parallel": st.integers(1, 10),
            "max_length": sizes,
            "num_blocks": sizes,
            "max_ragged_batch_size": sizes,
            "max_ragged_sequence_count": sizes,
            "max_tracked_sequences": st.integers(1, 300),
        }
    ),
)
def test_a_plan_holds_together(machine: Machine, replicas: int, values: dict[str, Any]) -> None:
    try:
        chosen = plan(machine, replicas, **values).engine
    except MIIError:
        return
    assert chosen.max_ragged_sequence_count is not None and chosen.max_length is not None
    assert chosen.max_ragged_batch_size is not None and chosen.block_size is not None
    assert 1 <= chosen.max_ragged_sequence_count <= chosen.max_ragged_batch_size
    assert chosen.max_ragged_sequence_count <= chosen.max_tracked_sequences
    if chosen.num_blocks is not None:
        assert chosen.max_length <= chosen.num_blocks * chosen.block_size
    again = plan_engine(chosen, ModelFacts.of(SMOLLM2), machine, replicas)
    assert again.engine == chosen  # a plan of a plan changes nothing


def test_this_machine() -> None:
    machine = Machine.here({})
    assert machine.cores >= 1 and machine.memory_bytes > 0
    assert machine.gpus or machine.no_gpu_reason
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


def test_a_deployment_is_judged_by_its_folder(tmp_path: Path) -> None:
    config = DeploymentConfig(
        deployment_name="d", engine=replace(engine(), model_path=str(tmp_path / "gone"))
    )
    with pytest.raises(ModelError, match="gone"):
        plan_deployment(config, LAPTOP)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    with pytest.raises(ModelError, match="no weights"):
        plan_deployment(replace(config, engine=replace(engine(), model_path=str(tmp_path))), LAPTOP)


def test_planning_needs_no_torch() -> None:
    code = "import sys, mii.strategy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
