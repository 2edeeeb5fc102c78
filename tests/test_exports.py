"""What `import mii` gives, and what it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import mii


def test_all_names_are_there_and_no_others() -> None:
    assert sorted(mii.__all__) == dir(mii) == mii.__all__
    for name in mii.__all__:
        assert getattr(mii, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(mii, "sevre")


def test_functions_stay_functions_when_their_modules_namesakes_are_imported() -> None:
    client, pipeline = mii.client, mii.pipeline
    for name in ("client", "pipeline"):
        module = importlib.import_module(f"mii.{name}")
        assert module.__name__ == f"mii.{name}"
    assert mii.client is client and mii.pipeline is pipeline
    assert callable(mii.client) and callable(mii.pipeline)


def imported_by(statement: str) -> set[str]:
    """Return the top-level names of what a statement imports."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return {name.partition(".")[0] for name in answer.split()}


def test_importing_mii_loads_nothing_of_weight() -> None:
    heavy = {"torch", "transformers", "numpy", "grpc", "aiohttp", "google", "rich", "pydantic"}
    assert not imported_by("import mii") & heavy


def test_serving_needs_no_torch_in_the_callers_process() -> None:
    assert not imported_by("import mii; mii.serve, mii.client") & {"torch", "transformers"}
