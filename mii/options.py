"""What `serve()`, `pipeline()`, `build_hf_engine()` and the command line may be told.

`mii.option_table` holds every option once, with the other spellings that count as it
(DeepSpeed-MII's own, and those that articles about it show). Here a user's words become the frozen
configuration that everything behind works with. No other module reads options from the environment.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mii.config import DeploymentConfig, EngineConfig
from mii.engine.params import ALIASES as PARAMETER_ALIASES
from mii.engine.params import PARAMETER_NAMES
from mii.errors import DeploymentError, InvalidArgument, UnknownArgument, shorten
from mii.option_checks import Choice
from mii.option_table import OPTION_NAMES, OPTIONS
from mii.tls import check_certificate, server_context

_logger = logging.getLogger("mii")

# Dictionaries that DeepSpeed-MII nests options in.
_NESTED = (
    *("model_config", "model_conf", "mii_config"),
    *("inference_engine_config", "engine_config", "state_manager", "manager"),
    *("tensor_parallel", "tp", "quantization"),
)


@dataclass(frozen=True)
class _Given:
    """One option as a user gave it."""

    name: str
    value: object
    spelling: str  # with the dictionaries that it stood in, dotted


def check_options(
    values: Mapping[str, object],
    where: str,
    scopes: tuple[str, ...] = ("engine", "deployment"),
) -> dict[str, Any]:
    """Return options under their own names, checked. None and "auto" count as left out.

    Args:
        values: what a user wrote; DeepSpeed-MII's nested dictionaries are looked into.
        where: who takes them, such as "serve()", for messages.
        scopes: whose options are taken.

    Raises:
        UnknownArgument: for a name that is no option here.
        InvalidArgument: for a value of the wrong type or out of range, and for an option that was
            given twice with different values.
    """
    checked: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for given in _flatten(values, "", 0):
        option = OPTION_NAMES.get(given.name)
        if option is None or option.scope not in (*scopes, "ignored"):
            raise _unknown(given.name, where, scopes)
        value = option.check.check(given.spelling, given.value)
        if option.scope == "ignored":
            _logger.warning("%s changes nothing: %s", given.spelling, option.doc)
            continue
        before = checked.setdefault(option.name, value)
        spelling = spellings.setdefault(option.name, given.spelling)
        if before != value:
            raise InvalidArgument(
                f"{spelling} = {shorten(before)} and {given.spelling} = {shorten(value)} "
                "say different things about the same option: give one",
                given.spelling,
            )
    _check_together(checked, spellings)
    return checked


def _flatten(values: Mapping[Any, object], prefix: str, depth: int) -> Iterator[_Given]:
    """Yield options one by one, those in nested dictionaries too; left-out ones not."""
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidArgument.of("an argument's name", name, "text")
        spelling = prefix + name
        nested = isinstance(value, Mapping)
        if value is None or (isinstance(value, str) and value == "auto"):
            continue
        if name == "memory_config":
            yield from _memory_config(value, spelling)
        elif name == "replica_configs":
            yield from _replica_configs(value, spelling)
        elif name in ("tensor_parallel", "tp") and not nested:
            yield _Given("tensor_parallel", value, spelling)
        elif name not in _NESTED:
            yield _Given(name, value, spelling)
        elif isinstance(value, Mapping) and depth < 5:
            yield from _flatten(value, f"{spelling}.", depth + 1)
        else:
            raise InvalidArgument.of(spelling, value, "a dictionary of options")


def _memory_config(value: object, spelling: str) -> Iterator[_Given]:
    """DeepSpeed's size of the KV cache: `allocate` counts blocks, `reserve` what to leave free."""
    if not isinstance(value, Mapping) or not set(value) <= {"mode", "size"}:
        raise InvalidArgument.of(spelling, value, 'a dictionary of "mode" and "size"')
    mode = Choice((("reserve", "reserve"), ("allocate", "allocate")))
    if mode.check(f"{spelling}.mode", value.get("mode", "reserve")) == "allocate":
        yield _Given("num_blocks", value.get("size"), f"{spelling}.size")
    else:
        _logger.warning("%s changes nothing: gpu_memory_fraction says what stays free", spelling)


def _replica_configs(value: object, spelling: str) -> Iterator[_Given]:
    """DeepSpeed's list of places, of which only the number counts here."""
    allowed = "a list of one dictionary for each replica, without other hosts or chosen GPUs"
    if not isinstance(value, list | tuple):
        raise InvalidArgument.of(spelling, value, allowed)
    for item in value:
        if not isinstance(item, Mapping) or item.get("gpu_indices"):
            raise InvalidArgument.of(spelling, value, allowed)
        if item.get("hostname") not in (None, "", "localhost"):
            raise InvalidArgument.of(spelling, value, allowed)
    if value:
        yield _Given("replica_num", len(value), f"len({spelling})")


def _unknown(name: str, where: str, scopes: tuple[str, ...]) -> UnknownArgument:
    if name in PARAMETER_NAMES or name in PARAMETER_ALIASES:
        return UnknownArgument(
            f"{where} has no argument {name!r}: it belongs to each request, as in "
            f"client(prompts, {name}=...)",
            name,
        )
    option = OPTION_NAMES.get(name)
    if option is not None:
        return UnknownArgument(f"{where} has no argument {name!r}: it is one of serve()", name)
    known = [key for key, each in OPTION_NAMES.items() if each.scope in scopes]
    return UnknownArgument.named(name, [*known, *_NESTED], where)


def _check_together(values: Mapping[str, Any], spellings: Mapping[str, str]) -> None:
    """Check what options say about each other."""
    if "num_blocks" in values and "kv_cache_bytes" in values:
        raise InvalidArgument(
            "num_blocks and kv_cache_bytes both say how large the KV cache is: give one",
            spellings["kv_cache_bytes"],
        )
    sequences = values.get("max_ragged_sequence_count", 1)
    for name in ("max_ragged_batch_size", "token_budget", "max_tracked_sequences"):
        limit = values.get(name)
        if limit is not None and sequences > limit:
            raise InvalidArgument.of(
                spellings["max_ragged_sequence_count"], sequences, f"at most {name}, {limit}"
            )
    if "rest_port" in values and not values.get("enable_rest"):
        _logger.warning("%s changes nothing without enable_rest", spellings["rest_port"])


def engine_config(
    values: Mapping[str, object],
    where: str = "pipeline()",
    environment: Mapping[str, str] = os.environ,
) -> EngineConfig:
    """Return the engine that a user's options describe; its `model_path` is yet to be located.

    Raises:
        InvalidArgument: for anything that is not allowed.
    """
    return _engine_of(check_options(values, where, ("engine",)), where, environment)


def deployment_config(
    values: Mapping[str, object],
    where: str = "serve()",
    environment: Mapping[str, str] = os.environ,
) -> DeploymentConfig:
    """Return the deployment that a user's options describe; see `engine_config`.

    Raises:
        InvalidArgument: for anything that is not allowed.
        DeploymentError: in any but the first process of a distributed launcher.
    """
    rank = environment.get("RANK", "0")
    if rank != "0":
        raise DeploymentError(
            f"RANK is {shorten(rank)}: this looks like a distributed launcher's process; start the "
            "script once, with plain python, and mii starts the ranks itself"
        )
    checked = check_options(values, where)
    engine = _engine_of(checked, where, environment)
    own = {
        o.name: checked[o.name] for o in OPTIONS if o.scope == "deployment" and o.name in checked
    }
    own.setdefault("deployment_name", default_deployment_name(engine.model_name))
    if "rest_host" not in own and "host" in own:
        own["rest_host"] = own["host"]
    if own.get("enable_rest") and own.get("port", 0) == own.get("rest_port", -1) != 0:
        raise InvalidArgument.of("rest_port", own["rest_port"], "another port than port")
    _check_openness(own)
    _check_tls(own)
    return DeploymentConfig(
        engine=engine,
        port_is_default="port" not in own,
        rest_port_is_default="rest_port" not in own,
        **own,
    )


def _check_openness(own: Mapping[str, Any]) -> None:
    """Refuse to let other machines in without a key, unless that is what the user says."""
    if own.get("api_keys") or own.get("allow_open_access"):
        return
    for name in ("host", "rest_host"):
        host = own.get(name, "localhost")
        if not is_loopback(host) and (name == "host" or own.get("enable_rest")):
            raise InvalidArgument(
                f"{name} = {shorten(host)} lets other machines in, and there are no api_keys: "
                "give api_keys=, or say allow_open_access=True if the network is to be trusted",
                name,
            )


def _check_tls(own: dict[str, Any]) -> None:
    """Judge the certificate now, rather than when the first client does."""
    names = ("tls_certificate", "tls_key")
    given = [name for name in names if name in own]
    if len(given) == 1 or ("tls_client_ca" in own and not given):
        missing = next(name for name in names if name not in own)
        raise InvalidArgument(
            f"TLS needs tls_certificate and tls_key: {missing} is missing", missing
        )
    if given:
        for name in (*names, "tls_client_ca"):
            if name in own:
                own[name] = os.path.abspath(os.path.expanduser(own[name]))
        own["tls_name"] = check_certificate(own["tls_certificate"], own["tls_key"])
        server_context(own["tls_certificate"], own["tls_key"], own.get("tls_client_ca"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def default_deployment_name(model_name: str) -> str:
    """Return what a deployment of a model is called unless told otherwise, as in DeepSpeed-MII."""
    return f"{model_name}-mii-deployment"


def _engine_of(
    checked: Mapping[str, Any], where: str, environment: Mapping[str, str]
) -> EngineConfig:
    own = {o.name: checked[o.name] for o in OPTIONS if o.scope == "engine" and o.name in checked}
    model = own.pop("model_name_or_path", None)
    if model is None:
        raise InvalidArgument(
            f"{where} needs a model: a folder, a .gguf file, a name on the Hugging Face hub, "
            'or "smollm2"',
            "model_name_or_path",
        )
    if "tensor_parallel" not in own and "WORLD_SIZE" in environment:
        check = OPTION_NAMES["tensor_parallel"].check
        size = check.parse(environment["WORLD_SIZE"])
        own["tensor_parallel"] = check.check("environment variable WORLD_SIZE", size)
    if "chat_template" in own:
        own["chat_template"] = _template_text(own["chat_template"])
    return EngineConfig(
        model_path=model,
        tokenizer_path=own.pop("tokenizer", model),
        model_name=model_name_of(model),
        **own,
    )


def model_name_of(model: str) -> str:
    """Return what users call a model: a path's last part, or the name itself."""
    path = os.path.expanduser(model)
    if os.path.exists(path) or os.path.isabs(path):
        model = os.path.basename(os.path.abspath(path)) or model
    return model.rstrip("/").removesuffix(".gguf") or model


def _template_text(text: str) -> str:
    if "\n" in text or "{" in text or len(text) > 1024:
        return text
    try:
        return Path(os.path.expanduser(text)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"chat_template = {shorten(text)} is neither a Jinja template nor a file that can be "
            f"read: {error}",
            "chat_template",
        ) from error
