"""The page: what is served, and in headless Chromium what a person does with it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake import FakeModel

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ANSWER = "# Sorting\n\nUse **`sorted`**, which returns a new list:\n\n```python\nsorted(words, key=len)\n```\n\n- stable\n- fast"


class PageModel(FakeModel):
    """With the figures of a real engine."""

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.generated = 0

    async def generate(self, generation):
        async for delta in super().generate(generation):
            self.generated += len(delta.tokens)
            yield delta

    def stats(self):
        figures = {"generated_tokens": self.generated, "prefix_queries": 200, "prefix_hits": 50}
        return super().stats() | figures


def says(text: str, **options: Any) -> PageModel:
    pieces = re.findall(r"<think>|</think>|\s?[^\s<]+|\s|<", text)
    return PageModel("fake", script=lambda generation, choice: pieces, **options)


def test_page_needs_no_key_and_nothing_from_elsewhere(serve):
    server = serve(api_keys=("secret",))
    reply = httpx.get(server.url + "/")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", reply.text)
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert httpx.get(server.url + "/stats").status_code == 401
    assert httpx.post(server.url + "/").status_code in (401, 405)


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by it: pip install 'surogate-core[test]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser) -> Iterator[Any]:
    """visit(server, **options of a context) opens the page; at the end nothing may have gone wrong on it."""
    wrong: list[str] = []

    def open_page(server, **options):
        page = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options).new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
        page.goto(server.url + "/")
        return page

    yield open_page
    assert wrong == []


def until(page, expression: str, seconds: float = 60.0) -> None:
    """Until it holds on the page. The page's policy forbids it to watch an expression by itself."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"it did not come to pass: {expression}"
        page.wait_for_timeout(20)


def send(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_a_conversation(serve, visit):
    model = says(ANSWER)
    page = visit(serve(model))
    page.wait_for_selector("#state.live")
    send(page, "How do I sort <b>words</b>?")
    page.wait_for_selector(".turn.assistant .tools")
    body = page.locator(".turn.assistant .body")
    assert body.locator("h3").inner_text() == "Sorting" and body.locator("li").count() == 2
    assert body.locator("pre code").inner_text() == "sorted(words, key=len)"
    assert page.locator(".turn.user b").count() == 0
    assert "tokens" in page.locator(".turn.assistant .figures").inner_text()
    assert page.evaluate("document.activeElement.id") == "input"
    send(page, "Again")
    until(page, "document.querySelectorAll('.turn.assistant .tools').length === 2")
    sent = [(each["role"], each["content"]) for each in model.rendered[-1][0]]
    assert [role for role, _ in sent] == ["user", "assistant", "user"] and sent[1][1] == ANSWER
    page.get_by_role("button", name="Again").last.click()
    until(page, "document.querySelectorAll('.turn.assistant .tools').length === 2")
    assert len(model.rendered) == 3 and len(model.rendered[-1][0]) == 3


def test_markup_of_a_model_stays_text(serve, visit):
    page = visit(serve(says("<img src=x onerror=alert(1)> <script>alert(2)</script> `<i>`")))
    page.wait_for_selector("#state.live")
    send(page, "Hi")
    page.wait_for_selector(".turn.assistant .tools")
    assert page.locator(".body img, .body script, .body i").count() == 0
    assert "<img src=x" in page.locator(".turn.assistant .body").inner_text()


def test_stopping(serve, visit):
    model = says("word " * 2000)
    model.delay = 0.01
    page = visit(serve(model))
    page.wait_for_selector("#state.live")
    send(page, "Go on")
    until(page, "document.querySelector('.turn.assistant .body').innerText.length > 10")
    page.keyboard.press("Escape")
    page.wait_for_selector(".turn.assistant .tools")
    assert page.locator(".figures").last.inner_text() == "stopped"
    assert page.locator("#send").is_visible() and not page.locator("#stop").is_visible()
    until(page, "document.getElementById('active').textContent === '0'")
    assert model.cancelled == 1


def test_thinking_settings_and_adapters(serve, visit):
    model = says("<think>Let me see</think>Four.")
    model.adapters = ["poet"]
    page = visit(serve(model))
    page.wait_for_selector("#state.live")
    assert page.locator("#model option").all_inner_texts() == ["fake", "poet (adapter)"]
    page.get_by_label("Model or adapter").select_option("poet")
    page.get_by_label("System prompt").fill("Be brief")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Thinking").select_option("low")
    send(page, "2 + 2?")
    page.wait_for_selector(".turn.assistant .tools")
    assert page.locator(".thought div").text_content() == "Let me see"
    assert page.locator(".turn.assistant .body").inner_text() == "Four."
    messages, _, options = model.rendered[-1]
    assert messages[0] == {"role": "system", "content": "Be brief"} and options["reasoning_effort"] == "low"
    assert model.seen[-1].adapter == "poet" and model.seen[-1].sampling.temperature == 0.2


def test_key_and_errors(serve, visit):
    server = serve(says("ok"), api_keys=("secret",))
    page = visit(server)
    page.wait_for_selector("#state.bad")
    assert "API key" in page.locator("#state").inner_text()
    page.get_by_label("API key").fill("secret")
    page.get_by_label("API key").press("Tab")
    page.wait_for_selector("#state.live")
    page.get_by_label("Longest answer").fill("0")
    send(page, "Hi")
    page.wait_for_selector(".error")
    assert "max_tokens" in page.locator(".error").inner_text()


def test_live_figures_and_themes(serve, visit):
    model = says("word " * 20000)
    model.delay = 0.01
    page = visit(serve(model), color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.wait_for_selector("#state.live")
    send(page, "Go on")
    until(page, "parseFloat(document.getElementById('rate').textContent) > 0")
    until(page, "document.getElementById('active').textContent === '1'")
    assert page.locator("#hits").inner_text() == "25.0 %" and page.locator("#kv").inner_text() == "25.0 %"
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_narrow_screens(serve, visit):
    page = visit(serve(says("ok")), viewport={"width": 390, "height": 800})
    page.wait_for_selector("#state.live")
    assert not page.locator("#side").is_visible()
    page.get_by_role("button", name="Engine").click()
    assert page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
