"""The page at /: for browsers alone, whole in itself, and open where the API needs a key."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mii.keys import digest_of
from mii.router.gateway import page_routes
from tests.router.conftest import StartRouter
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import RouterProcess

FOLDER = Path(page_routes.__file__).parent / "page"
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


def get(url: str, accept: str = "*/*") -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(url, headers={"Accept": accept}), timeout=10
    )


def test_a_browser_gets_the_page_and_a_program_what_is_served(router: RouterProcess) -> None:
    with get(router.url + "/", BROWSER) as response:
        assert response.headers.get_content_type() == "text/html"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        assert b"Playground" in response.read()
    with get(router.url + "/") as response:
        assert "/v1/models" in json.load(response)["routes"]


def test_all_that_the_page_names_is_served_and_nothing_comes_from_elsewhere(
    router: RouterProcess,
) -> None:
    page = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', page))
    assert len(named) >= 4
    for script in FOLDER.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    for path in named:
        with get(f"{router.url}/{path}") as response:
            assert response.read() == (FOLDER / path.removeprefix("page/")).read_bytes()
    for file in FOLDER.iterdir():
        if file.suffix != ".svg":
            assert "//" not in re.sub(r"(^|\s)//.*", "", file.read_text()).replace("${", ""), file
    assert "<script>" not in page and "style=" not in page


def test_every_label_and_handler_finds_its_element() -> None:
    page = (FOLDER / "index.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'\bfor="([^"]+)"', page))
    for script in FOLDER.glob("*.js"):
        text = script.read_text()
        asked |= set(re.findall(r'(?:\$|getElementById|numberIn)\("([\w-]+)"\)', text))
    assert asked <= set(ids), asked - set(ids)
    fields = re.findall(r'<(?:input|textarea)[^>]*\bid="([^"]+)"', page)
    assert set(fields) <= set(re.findall(r'\bfor="([^"]+)"', page))


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py"])
def test_no_other_file_is_served(router: RouterProcess, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(router.url + path)


def test_the_page_is_open_where_the_api_needs_a_key(start_router: StartRouter) -> None:
    router = start_router(api_keys=(digest_of("some-key-1"),))
    for path in ("/", "/page/style.css"):
        with get(router.url + path, BROWSER) as response:
            assert response.status == 200
    for path in ("/", "/metrics", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(router.url + path)


@pytest.fixture
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_a_person_asks_reads_and_sees_an_error(
    browser: Any, router: RouterProcess, workers: list[FakeWorker], scheme: str, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(router.url)
    page.wait_for_selector("#state.up")
    page.keyboard.press("Tab")
    page.fill("#prompt", "one two three")
    page.keyboard.press("Enter")
    page.wait_for_selector("#conversation .assistant:not(.busy)")
    assert page.inner_text("#conversation .assistant").startswith("user: one two three")
    page.click("text=Show as code")
    assert "chat/completions" in page.inner_text("#code")
    page.click("text=Python")
    assert "OpenAI(" in page.inner_text("#code")
    page.click("text=Parameters")
    page.fill("#temperature", "5000")
    page.fill("#prompt", "four")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "temperature" in page.inner_text("#error")
    page.wait_for_function("document.querySelectorAll('.tile').length >= 8")
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not faults
    page.close()
