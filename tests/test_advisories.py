"""Holes that servers of language models have had, class by class: none of them here.

A test is named after its class. Where other tests hold it, they are named instead:

- Unauthenticated control planes (Ray, SGLang, vLLM's gRPC): tests/system/test_security.py.
- Keys compared in time that tells of them (vLLM CVE-2025-59425): tests/router/test_access.py.
- Grammars, expressions and schemas that take for ever (vLLM CVE-2025-48942 to -48944):
  tests/engine/test_grammar.py; parameters out of range, NaN, huge n (GHSA-7h4p-rffg-7823):
  tests/router/test_gateway_bodies.py, tests/workers/test_servicer.py.
- Broken HTTP, floods, rapid reset (CVE-2023-44487, CVE-2025-23310): tests/http2/test_hostile.py.
- Answers that come sooner where others have asked the same (vLLM CVE-2025-46570):
  tests/engine/test_scheduler.py.
- Errors that tell of the inside (vLLM CVE-2026-22778): tests/test_status.py.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import mii
from mii.engine.prompts import ChatPrompt
from mii.errors import InvalidArgument, MIIError
from mii.models.tokenizer import load_tokenizer
from mii.router.gateway import chat
from tests.models.test_tokenizer import byte_level_backend

ROOT = Path(mii.__file__).parent


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of ours."""
    for folder in (ROOT, *(ROOT / name for name in ("kernels", "proto", "router", "workers"))):
        for path in sorted(folder.resolve().rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the name of what is called, as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_pickle_on_a_socket() -> None:
    """vLLM CVE-2025-32444, SGLang CVE-2025-10164 and CVE-2026-3059, Meta CVE-2024-50050."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "zmq"}
    seen = 0
    for path, tree in sources():
        seen += 1
        # Its error is what torch raises for a pickle that it refuses.
        allowed = {"pickle"} if path.name == "weights.py" else set()
        assert not imported(tree) & (forbidden - allowed), path
        for name, _ in calls(tree):
            assert name not in ("eval", "exec", "compile", "__import__"), path
            assert not name.startswith("pickle."), path
    assert seen > 100


def test_tensors_from_pickled_files() -> None:
    """vLLM CVE-2025-24357 and CVE-2025-62164: torch.load without weights_only."""
    loads = 0
    for path, tree in sources():
        for name, call in calls(tree):
            if name == "torch.load":
                loads += 1
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert options.get("weights_only") == "True", path
    assert loads > 0


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A tokenizer's folder whose configuration names code of its own, which leaves a trace."""
    PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    path.write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast as Evil\n"
    )
    return tmp_path


def test_code_in_model_files(with_code: Path) -> None:
    """vLLM CVE-2025-66448 and CVE-2026-22807: auto_map is followed though nobody allowed it."""
    with contextlib.suppress(MIIError):  # it may be read without its code, or not at all
        load_tokenizer(with_code)
    assert not (with_code / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_template_injection(tmp_path: Path, template: str) -> None:
    """SGLang CVE-2026-5760: a chat template out of a GGUF file runs what it likes."""
    PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(InvalidArgument, match="template refuses"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_template_in_a_request() -> None:
    """vLLM CVE-2025-61620 and CVE-2025-62426: requests bring templates, or steer the renderer."""
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ 1 }}"}
    asked = chat.asked_of(body, None, "")
    assert "chat_template" in asked.ignored
    assert "chat_template" not in ChatPrompt.__dataclass_fields__
    assert "{{" not in str(asked.request)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    ],
)
def test_addresses_and_files_in_requests(part: dict[str, object]) -> None:
    """vLLM CVE-2025-6242, LMDeploy CVE-2026-33626: the server fetches what a request names."""
    with pytest.raises(InvalidArgument, match=r"content\[0\]"):
        chat.asked_of({"messages": [{"role": "user", "content": [part]}]}, None, "")
