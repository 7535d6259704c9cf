"""The page at / in a real browser: a conversation, thinking, stop, an error, the expert map, keyboard, dark mode."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, slow):
    """A fresh page; the test fails on any error in its console and on any request that leaves the server."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda r: problems.append(r.url) if not r.url.startswith((slow.url, "data:")) else None
    )
    page.goto(slow.url)
    page.wait_for_function("document.getElementById('model').textContent.includes('ready')")
    yield page
    context.close()
    assert not problems


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answer(page):
    return page.locator(".message.assistant").last


def test_conversation_streams_with_the_thinking_folded(page):
    ask(page, "<think>let me see</think>Hello there!")
    expect = playwright.expect
    expect(answer(page).locator("> .text")).to_have_text("Hello there!")
    thinking = answer(page).locator("details.thinking")
    expect(thinking).to_be_visible()
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    expect(thinking.locator(".text")).to_have_text("let me see")
    expect(page.locator("#speed")).to_contain_text("tokens")
    ask(page, "and again")
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(answer(page).locator("> .text")).to_have_text("and again")
    page.click("#reset")
    expect(page.locator(".message")).to_have_count(0)


def test_an_answer_can_be_stopped(page, slow):
    ask(page, "a very long answer " * 40)
    playwright.expect(answer(page).locator("> .text")).to_contain_text("a very")
    page.click("#stop")
    playwright.expect(answer(page)).to_contain_text("Stopped.")
    assert len(answer(page).locator("> .text").inner_text()) < 700
    page.wait_for_function("document.getElementById('requests').textContent.startsWith('0 /')", timeout=3000)
    ask(page, "with the keyboard " * 40)
    playwright.expect(answer(page).locator("> .text")).to_contain_text("with")
    page.keyboard.press("Escape")
    playwright.expect(answer(page)).to_contain_text("Stopped.")


def test_an_error_is_shown_in_the_servers_words(page):
    page.locator("#parameters summary").click()
    page.fill("[name=max_tokens]", "100000")
    ask(page, "too much")
    alert = page.locator("#error")
    playwright.expect(alert).to_be_visible()
    playwright.expect(alert).to_contain_text("maximum context length is 4096")
    page.fill("[name=max_tokens]", "3")
    ask(page, "now well")
    playwright.expect(answer(page).locator("> .text")).to_have_text("now")
    playwright.expect(alert).to_be_hidden()
    playwright.expect(answer(page)).to_contain_text("Cut off")


def test_the_expert_map_moves_and_can_be_read_by_keyboard(page):
    picture = "document.getElementById('experts').toDataURL()"
    page.wait_for_function("document.getElementById('experts').width > 100")
    before = page.evaluate(picture)
    ask(page, "make the experts work " * 4)
    page.wait_for_function(f"{picture} !== {before!r}")
    page.wait_for_function("parseFloat(document.getElementById('rate').textContent) > 5")
    playwright.expect(page.locator("#experts-note")).to_contain_text("8 layers")
    playwright.expect(page.locator("#hit-rate")).to_have_text("75 %")
    page.focus("#experts")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#expert")).to_contain_text("Layer 1, expert 1")


def test_everything_can_be_reached_by_tab(page):
    seen = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "messages", "prompt", "send", "reset", "SUMMARY", "experts"} <= seen


def test_light_and_dark(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != light
    page.click("#theme")
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{background} !== {light!r}")


def test_narrow_screens_do_not_scroll_sideways(page):
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.skipif("MINISGL_SCREENSHOT" not in os.environ, reason="MINISGL_SCREENSHOT does not name a file")
def test_screenshot(page):
    thought = "They want to know what a mixture of experts is. Short."
    ask(page, f"<think>{thought}</think>A router sends each token to a few of many small networks.")
    page.wait_for_timeout(3500)
    page.screenshot(path=str(pathlib.Path(os.environ["MINISGL_SCREENSHOT"])))
