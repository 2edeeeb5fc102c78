"""What a user writes becomes one configuration, or one clear error."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mii.config import DeploymentConfig, EngineConfig
from mii.errors import DeploymentError, InvalidArgument, MIIError, UnknownArgument
from mii.option_table import OPTION_NAMES, OPTIONS
from mii.options import check_options, deployment_config, engine_config, model_name_of

NO_ENVIRONMENT: dict[str, str] = {}


def deployment(**values: Any) -> DeploymentConfig:
    return deployment_config({"model": "some/model", **values}, environment=NO_ENVIRONMENT)


def engine(**values: Any) -> EngineConfig:
    return engine_config({"model": "some/model", **values}, environment=NO_ENVIRONMENT)


def test_every_field_of_the_configuration_has_its_option() -> None:
    located = {"model_path", "tokenizer_path", "model_name"}  # from model and tokenizer
    from_options = {option.name for option in OPTIONS if option.scope == "engine"}
    assert (
        from_options - {"model_name_or_path", "tokenizer"}
        == {f.name for f in fields(EngineConfig)} - located
    )
    derived = {"engine", "port_is_default", "rest_port_is_default", "cache_path", "devices"}
    derived |= {"tls_name", "token"}
    assert {option.name for option in OPTIONS if option.scope == "deployment"} == {
        f.name for f in fields(DeploymentConfig)
    } - derived


def test_nothing_but_a_model_gives_the_defaults() -> None:
    config = deployment()
    assert config.engine.model_path == config.engine.tokenizer_path == "some/model"
    assert config.deployment_name == "some/model-mii-deployment"
    assert (config.port, config.port_is_default) == (50050, True)
    assert (config.rest_port, config.rest_port_is_default) == (28080, True)
    assert config.host == config.rest_host == "localhost" and not config.enable_rest
    assert config.engine.tensor_parallel == config.replica_num == 1


def test_the_articles_spellings() -> None:
    config = deployment_config(
        {"model_name": "m", "tensor_parallel": 2, "port": 50051, "enable_rest": True},
        environment=NO_ENVIRONMENT,
    )
    assert config.engine.tensor_parallel == 2 and config.enable_rest
    assert (config.port, config.port_is_default) == (50051, False)


def test_deepspeed_miis_spellings() -> None:
    config = deployment_config(
        {
            "model_config": {
                "model_name_or_path": "m",
                "tokenizer": "t",
                "task": "text-generation",
                "tensor_parallel": 2,
                "inference_engine_config": {
                    "tensor_parallel": {"tp_size": 2},
                    "state_manager": {
                        "max_ragged_batch_size": 512,
                        "max_ragged_sequence_count": 32,
                        "max_tracked_sequences": 100,
                        "max_context": 8192,
                        "memory_config": {"mode": "allocate", "size": 77},
                        "offload": False,
                    },
                    "quantization": {"quantization_mode": None},
                },
                "torch_dist_port": 29500,
                "zmq_port_number": 25555,
                "replica_num": 2,
                "replica_configs": [{"hostname": ""}, {"hostname": "localhost"}],
                "device_map": "auto",
                "max_length": 1024,
                "sync_debug": False,
                "profile_model_time": True,
                "quantization_mode": None,
            },
            "mii_config": {
                "deployment_name": "d",
                "deployment_type": "local",
                "port_number": 50060,
                "enable_restful_api": True,
                "restful_api_port": 28081,
                "restful_api_host": "0.0.0.0",
                "allow_open_access": True,
                "restful_processes": 32,
                "hostfile": "/job/hostfile",
                "version": 1,
                "instance_type": "Standard_NC12s_v3",
            },
        },
        environment=NO_ENVIRONMENT,
    )
    assert config == DeploymentConfig(
        deployment_name="d",
        replica_num=2,
        port=50060,
        enable_rest=True,
        rest_port=28081,
        rest_host="0.0.0.0",
        allow_open_access=True,
        engine=EngineConfig(
            model_path="m",
            tokenizer_path="t",
            model_name="m",
            tensor_parallel=2,
            max_length=1024,
            max_ragged_batch_size=512,
            max_ragged_sequence_count=32,
            max_tracked_sequences=100,
            num_blocks=77,
        ),
    )


@pytest.mark.parametrize(
    "form",
    [
        {"tensor_parallel": {"tp_size": 2}, "max_ragged_sequence_count": 256},
        {"tp": {"tp_size": 2}, "state_manager": {"max_ragged_sequence_count": 256}},
        {"tp": 2, "manager": {"max_ragged_sequence_count": 256}},
    ],
)
def test_engine_config_flat_and_nested(form: dict[str, Any]) -> None:
    config = engine(engine_config={**form, "max_ragged_batch_size": 8192})
    assert config.tensor_parallel == 2
    assert config.max_ragged_sequence_count == 256 and config.max_ragged_batch_size == 8192


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.bfloat16, "bfloat16"),
        ("torch.float16", "float16"),
        ("fp32", "float32"),
        (torch.float32, "float32"),
        ("auto", "auto"),
        (None, "auto"),
    ],
)
def test_dtypes(value: object, dtype: str) -> None:
    assert engine(dtype=value).dtype == engine(torch_dtype=value).dtype == dtype


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"dtype": "int7"}, "dtype", "one of auto, float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "dtype", "torch.int8"),
        ({"tensor_parallel": 0}, "tensor_parallel", "integer from 1"),
        ({"tensor_parallel": "2"}, "tensor_parallel", "integer"),
        ({"tensor_parallel": True}, "tensor_parallel", "True is not allowed"),
        ({"tp": {"tp_size": 1.5}}, "tp.tp_size", "1.5"),
        ({"replica_num": -1}, "replica_num", "-1"),
        ({"port": 65536}, "port", "65535"),
        ({"port": "http"}, "port", "'http'"),
        ({"host": ""}, "host", "text"),
        ({"host": "a\0b"}, "host", "text"),
        ({"model": "\ud800"}, "model", "text"),
        ({"model": 3}, "model", "a folder"),
        ({"deployment_name": "x" * 201}, "deployment_name", "200"),
        ({"block_size": 24}, "block_size", "1, 2, 4, 8, 16, 32"),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes", "2GiB"),
        ({"gpu_memory_fraction": float("nan")}, "gpu_memory_fraction", "above 0"),
        ({"gpu_memory_fraction": 10**400}, "gpu_memory_fraction", "up to 1"),
        ({"enable_rest": 1}, "enable_rest", "True or False"),
        ({"quantization_mode": "wf6af16"}, "quantization_mode", "not quantised"),
        ({"device_map": {"localhost": [[0]]}}, "device_map", "CUDA_VISIBLE_DEVICES"),
        ({"deployment_type": "non-persistent"}, "deployment_type", "mii.pipeline"),
        ({"task": "fill-mask"}, "task", "text-generation"),
        ({"offload": True}, "offload", "False"),
        ({"mii_config": 5}, "mii_config", "dictionary"),
        ({"mii_config": {"port_number": 0.5}}, "mii_config.port_number", "0.5"),
        ({"replica_configs": [{"hostname": "other"}]}, "replica_configs", "without other hosts"),
        ({"replica_configs": [{}, {}], "replica_num": 3}, "replica_num", "3"),
        ({"num_blocks": 5, "kv_cache_bytes": 100}, "kv_cache_bytes", "give one"),
        ({"max_ragged_sequence_count": 9, "token_budget": 8}, "max_ragged_sequence_count", "8"),
        ({"enable_rest": True, "port": 5, "rest_port": 5}, "rest_port", "another port"),
        ({"port": 1, "port_number": 2}, "port_number", "port = 1 and port_number = 2"),
        ({"chat_template": "/no/such/file"}, "chat_template", "neither"),
        ({1: 2}, "an argument's name", "text"),
    ],
)
def test_what_is_not_allowed_names_field_value_and_range(
    values: dict[Any, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        deployment_config({"model_name_or_path": "m", **values}, environment=NO_ENVIRONMENT)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_no_model_says_what_could_stand_there() -> None:
    with pytest.raises(InvalidArgument, match="folder"):
        deployment_config({}, environment=NO_ENVIRONMENT)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("replica_nums", "did you mean 'replica_num'"),
        ("enable_restful", "did you mean 'enable_rest'"),
        ("max_new_tokens", "belongs to each request"),
        ("\ud800", "no argument"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, words: str) -> None:
    with pytest.raises(UnknownArgument, match=words):
        deployment(**{name: 1})


def test_a_pipeline_refuses_what_only_a_deployment_has() -> None:
    with pytest.raises(UnknownArgument, match="one of serve"):
        engine(port=1)


def test_the_same_value_twice_is_no_conflict() -> None:
    assert deployment(tensor_parallel=2, tp={"tp_size": 2}).engine.tensor_parallel == 2
    assert deployment(dtype="fp16", torch_dtype=torch.float16).engine.dtype == "float16"


def test_auto_and_none_count_as_left_out() -> None:
    assert deployment(tensor_parallel="auto", port=None, replica_num="auto") == deployment()


@pytest.mark.parametrize(
    ("size", "count"),
    [(10, 10), ("512", 512), ("2GiB", 2**31), ("1.5 MB", 1_500_000), ("3k", 3000)],
)
def test_sizes(size: object, count: int) -> None:
    assert engine(kv_cache_bytes=size).kv_cache_bytes == count


def test_numbers_of_numpy_are_numbers() -> None:
    config = engine(tensor_parallel=numpy.int64(2), gpu_memory_fraction=numpy.float32(0.5))
    assert (config.tensor_parallel, config.gpu_memory_fraction) == (2, 0.5)
    assert type(config.tensor_parallel) is int


def test_world_size_is_the_default_of_tensor_parallel() -> None:
    environment = {"WORLD_SIZE": "2"}
    assert engine_config({"model": "m"}, environment=environment).tensor_parallel == 2
    config = engine_config({"model": "m", "tensor_parallel": 3}, environment=environment)
    assert config.tensor_parallel == 3
    with pytest.raises(InvalidArgument, match="WORLD_SIZE = 'two'"):
        engine_config({"model": "m"}, environment={"WORLD_SIZE": "two"})


def test_other_ranks_of_a_launcher_are_told_to_leave_it_to_us() -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(DeploymentError, match="plain python"):
        deployment_config({"model": "m"}, environment=environment)
    deployment_config({"model": "m"}, environment={**environment, "RANK": "0"})


def test_http_listens_where_grpc_does_unless_told_otherwise() -> None:
    assert deployment(host="::1").rest_host == "::1"
    assert deployment(host="::1", rest_host="localhost").rest_host == "localhost"


def test_a_chat_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("{{ messages }}")
    assert engine(chat_template=file).chat_template == "{{ messages }}"
    assert engine(chat_template="{{ x }}").chat_template == "{{ x }}"


def test_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_name_of("tiny") == model_name_of("./tiny/") == model_name_of("tiny/.") == "tiny"
    assert model_name_of(str(tmp_path / "tiny")) == "tiny"
    assert model_name_of("/nowhere/q4.gguf") == "q4"
    assert model_name_of("org/model") == "org/model"


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=4)
    | st.sampled_from(["auto", "2GiB", "local", "float16", torch.float16]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*OPTION_NAMES, "mode", "size", "state_manager", "hostname"])
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*OPTION_NAMES, "model_config", "engine_config", "tp", "memory_config", "replica_configs"]
)


@given(st.dictionaries(NAMES | st.text(max_size=5), PLAIN, max_size=5))
def test_whatever_is_written_gives_a_configuration_or_an_error_of_ours(
    values: dict[str, Any],
) -> None:
    try:
        config = deployment_config(values, environment=NO_ENVIRONMENT)
    except MIIError:
        return
    assert DeploymentConfig.from_json(config.to_json()) == config


@given(st.sampled_from(OPTIONS), st.text(max_size=20))
def test_a_command_lines_text_is_a_value_or_an_error_of_ours(option: Any, text: str) -> None:
    with contextlib.suppress(MIIError):
        option.check.check(option.name, option.check.parse(text))


def test_ignored_options_say_so(caplog: pytest.LogCaptureFixture) -> None:
    assert check_options({"restful_processes": 4}, "serve()") == {}
    assert "restful_processes changes nothing" in caplog.text
