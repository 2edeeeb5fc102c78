"""The families that mii knows. A new one is a file here and a line in the table below."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mii.errors import UnsupportedModel

if TYPE_CHECKING:
    from mii.models.policies.base import Policy

# By the model_type of config.json. Read without torch by whoever checks a model before loading it.
_MODULES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

SUPPORTED_MODEL_TYPES = frozenset(_MODULES)


def policy_for(model_type: str) -> Policy:
    """Return the policy of a family.

    Raises:
        UnsupportedModel: naming the families that there are.
    """
    if model_type not in _MODULES:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported: known are "
            + ", ".join(sorted(SUPPORTED_MODEL_TYPES))
        )
    policy: Policy = import_module(f"mii.models.policies.{_MODULES[model_type]}").POLICY
    return policy
