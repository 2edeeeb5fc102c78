"""The functions that a user calls. Thin: options, plan and launch do the work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mii.channel import TLS_CA_VARIABLE
from mii.client import MIIClient
from mii.config import DeploymentConfig, EngineConfig
from mii.errors import InvalidArgument
from mii.keys import draw_token
from mii.launch import ShowProgress, start_deployment, waiter_for_end
from mii.machine import Machine
from mii.models.checkpoint import default_cache, resolve_model
from mii.options import (
    default_deployment_name,
    deployment_config,
    engine_config,
    model_name_of,
)
from mii.progress_display import ProgressDisplay
from mii.registry import DeploymentRecord, Registry, name_taken
from mii.response import Response
from mii.strategy import Plan, inspect_model, plan_deployment, plan_engine

if TYPE_CHECKING:
    from mii.engine.engine_v2 import InferenceEngineV2
    from mii.pipeline import MIIPipeline


def serve(
    model_name_or_path: str | os.PathLike[str] | None = None,
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> MIIClient:
    """Start a deployment that outlives this script, and return a client of it.

    Args:
        model_name_or_path: a folder in Hugging Face form, a .gguf file, a name on the Hugging Face
            hub, or "smollm2".
        model_config: options in a dictionary, as in DeepSpeed-MII.
        mii_config: more of them.
        options: see `mii serve --help`; the most used are tensor_parallel, replica_num, port,
            enable_rest, deployment_name, max_length and dtype. DeepSpeed-MII's names count too.

    Raises:
        InvalidArgument: for an option that is unknown or not allowed.
        ModelError: for a model that cannot be found, read or run.
        DeploymentError: if the deployment cannot start; PortInUse if a port is the reason.
    """
    values = {
        "model_name_or_path": model_name_or_path,
        "model_config": model_config,
        "mii_config": mii_config,
        **options,
    }
    with ProgressDisplay() as show:
        config, _ = configure_deployment(values, "serve()", show)
        start_deployment(config, show)
    return client_of(Registry(default_cache()).get(config.deployment_name))


def client(
    name_or_address: str, *, api_key: str | None = None, tls_ca: str | None = None
) -> MIIClient:
    """Return a client of a running deployment.

    Args:
        name_or_address: the deployment's name, its model's name, or host:port of its router.
        api_key: one of the deployment's keys, if it asks for one; None: $MII_API_KEY. A deployment
            of this user on this machine needs none.
        tls_ca: a PEM file with the authority of the deployment's certificate, if it speaks TLS;
            "": one that this machine trusts anyway.

    Raises:
        DeploymentNotFoundError: if none of that name runs on this machine.
    """
    if not isinstance(name_or_address, str):
        raise InvalidArgument.of("name_or_address", name_or_address, "a name or host:port")
    record = find_deployment(name_or_address)
    if record is not None:
        return client_of(record, api_key=api_key, tls_ca=tls_ca)
    host, _, port = name_or_address.rpartition(":")
    if host and port.isdecimal():
        return MIIClient(name_or_address, api_key=api_key, tls_ca=tls_ca)
    return client_of(Registry(default_cache()).get(name_or_address))


def pipeline(
    model_name_or_path: str | os.PathLike[str] | None = None,
    model_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> MIIPipeline:
    """Run the engine in this process; free it with `destroy()` or by a `with` block.

    Args:
        model_name_or_path: as in `serve`.
        model_config: options in a dictionary, as in DeepSpeed-MII.
        options: those of `serve` that concern the engine: tensor_parallel, dtype, max_length, ...

    Raises:
        InvalidArgument: for an option that is unknown or not allowed.
        ModelError: for a model that cannot be found, read or run.
    """
    from mii.pipeline import build_pipeline  # torch

    values = {
        "model_name_or_path": model_name_or_path,
        "model_config": model_config,
        **options,
    }
    with ProgressDisplay() as show:
        config = configure_engine(values, "pipeline()", show)
        return build_pipeline(config, show)


def build_hf_engine(
    path: str | os.PathLike[str],
    engine_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> InferenceEngineV2:
    """Build the engine of FastGen by itself: `put`, `query`, `can_schedule`, `flush`.

    Args:
        path: as `model_name_or_path` of `serve`.
        engine_config: a flat dictionary of options, or nested as DeepSpeed's
            RaggedInferenceEngineConfig, {"tensor_parallel": ..., "state_manager": ...}.
        options: as in `pipeline`.

    Raises:
        InvalidArgument: for an option that is unknown or not allowed.
        ModelError: for a model that cannot be found, read or run.
    """
    from mii.pipeline import build_engine  # torch

    values = {
        "model_name_or_path": path,
        "engine_config": engine_config,
        "skip_tokenizer": True,
        **options,
    }
    with ProgressDisplay() as show:
        return build_engine(configure_engine(values, "build_hf_engine()", show), show)


class QueryHandle:
    """What `mii_query_handle` returns: a deployment or a pipeline behind `query`."""

    def __init__(self, target: MIIClient | MIIPipeline) -> None:
        self._target = target

    def query(
        self,
        request: Any = None,
        /,
        prompts: str | Sequence[str] | None = None,
        **params: Any,
    ) -> list[Response] | None:
        """Answer prompts.

        Args:
            request: {"query": [...]}, as in DeepSpeed-MII, or the prompts themselves.
            prompts: the prompts.
            params: sampling parameters, such as max_new_tokens and temperature.

        Raises:
            InvalidArgument: for a parameter that is unknown or not allowed.
        """
        if isinstance(request, Mapping):
            if set(request) != {"query"}:
                raise InvalidArgument.of("request", request, 'a dictionary {"query": [...]}')
            request = request["query"]
        if (request is None) == (prompts is None):
            raise InvalidArgument(
                'query() takes either prompts=[...] or {"query": [...]}', "prompts"
            )
        return self._target(request if prompts is None else prompts, **params)

    def terminate(self) -> None:
        """End the deployment, or free the pipeline."""
        if isinstance(self._target, MIIClient):
            self._target.terminate_server()
        else:
            self._target.destroy()


def mii_query_handle(
    name_or_model: str | os.PathLike[str], tensor_parallel: int | None = None, **options: Any
) -> QueryHandle:
    """Return a handle for queries: on a running deployment of that name, else in this process.

    Args:
        name_or_model: name of a running deployment, or a model as in `serve`.
        tensor_parallel: ranks of the pipeline, if one is made.
        options: of the pipeline, if one is made.
    """
    record = find_deployment(os.fspath(name_or_model))
    if record is not None:
        return QueryHandle(client(record.name))
    return QueryHandle(pipeline(name_or_model, tensor_parallel=tensor_parallel, **options))


def client_of(
    record: DeploymentRecord, *, api_key: str | None = None, tls_ca: str | None = None
) -> MIIClient:
    """Return a client of a deployment in the registry, which knows its token; see `client`."""
    if tls_ca is None and record.config.tls_certificate is not None:
        tls_ca = os.environ.get(TLS_CA_VARIABLE, record.config.tls_certificate)
    return MIIClient(
        record.address,
        deployment_name=record.name,
        rest_address=record.rest_address,
        wait_until_gone=waiter_for_end(record),
        is_gone=lambda: not record.supervisor.alive,
        api_key=api_key or record.config.token or None,
        tls_ca=tls_ca,
        tls_name=record.config.tls_name,
    )


def find_deployment(name: str) -> DeploymentRecord | None:
    """Return the running deployment of that name, or the one of default name of that model."""
    registry = Registry(default_cache())
    record = registry.find(name)
    if record is None:
        record = registry.find(default_deployment_name(model_name_of(name)))
        folder = os.path.realpath(os.path.expanduser(name))
        if record is not None and os.path.isdir(folder):  # it may be another folder of that name
            return record if record.config.engine.model_path == folder else None
    return record


def configure_deployment(
    values: Mapping[str, Any], where: str, show: ShowProgress
) -> tuple[DeploymentConfig, Plan]:
    """Turn a user's options into what will be started: checked, its model found, all sizes chosen.

    Raises:
        InvalidArgument, ModelError, DeploymentError: for what cannot work.
    """
    config = deployment_config(values, where)
    other = Registry(default_cache()).find(config.deployment_name)
    if other is not None and other.state != "stopping":
        raise name_taken(other)  # rather now than when the model has been fetched
    return complete_deployment(config, show)


def complete_deployment(
    config: DeploymentConfig, show: ShowProgress
) -> tuple[DeploymentConfig, Plan]:
    """Find the model of a checked configuration, and choose all sizes."""
    engine = locate(config.engine, show)
    config = replace(config, engine=engine, cache_path=str(default_cache()), token=draw_token())
    return plan_deployment(config, Machine.here())


def configure_engine(values: Mapping[str, Any], where: str, show: ShowProgress) -> EngineConfig:
    """Turn a user's options into one engine's configuration; see `configure_deployment`."""
    config = locate(engine_config(values, where), show)
    return plan_engine(config, inspect_model(config), Machine.here()).engine


def locate(config: EngineConfig, show: ShowProgress) -> EngineConfig:
    """Find the folders of model and tokenizer, fetching what is not here yet.

    Raises:
        ModelError: for a model that cannot be found.
    """
    cache = default_cache()
    model = resolve_model(config.model_path, cache, show)
    own = config.tokenizer_path == config.model_path
    tokenizer = model if own else resolve_model(config.tokenizer_path, cache, show)
    return replace(config, model_path=str(model), tokenizer_path=str(tokenizer))
