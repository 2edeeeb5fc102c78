"""Large language models served from Python in one line, as a cluster of gRPC microservices.

import mii

client = mii.serve("smollm2", replica_num=2)
print(client(["DeepSpeed is", "Seattle is"], max_new_tokens=64))
client.terminate_server()
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mii.api import build_hf_engine, client, mii_query_handle, pipeline, serve
    from mii.async_client import AsyncMIIClient
    from mii.client import MIIClient
    from mii.errors import DeploymentNotFoundError, MIIError, UnknownArgument
    from mii.response import Response

__version__: str

# Each name is imported when it is first asked for, so that `import mii` costs nothing else.
_HOMES = {
    "serve": "mii.api",
    "client": "mii.api",
    "pipeline": "mii.api",
    "mii_query_handle": "mii.api",
    "build_hf_engine": "mii.api",
    "MIIClient": "mii.client",
    "AsyncMIIClient": "mii.async_client",
    "Response": "mii.response",
    "MIIError": "mii.errors",
    "UnknownArgument": "mii.errors",
    "DeploymentNotFoundError": "mii.errors",
}

__all__ = [
    "AsyncMIIClient",
    "DeploymentNotFoundError",
    "MIIClient",
    "MIIError",
    "Response",
    "UnknownArgument",
    "__version__",
    "build_hf_engine",
    "client",
    "errors",
    "mii_query_handle",
    "pipeline",
    "serve",
]


class _Package(types.ModuleType):
    """Keeps `mii.client` and `mii.pipeline` the functions: importing a submodule would bind it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("mii.errors")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("mii")
    if name not in _HOMES:
        raise AttributeError(f"module 'mii' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
