"""The status page in headless Chromium: a real server with two engines, and scripted replies."""

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.browser import Page, browser_page
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import running_frontend
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.rig import TOKENIZER
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(300)

KEY = "secret"
THOUGHT = "<think>Only &lt;b&gt; thinks.</think>"
MARKUP = "<img src=x onerror='document.title=1'><script>document.title=2</script> & <b>bold</b>"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "<i>here</i>"}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}]{{ message.content }}{{ message.tool_call_id }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
PICTURES = Path(os.environ.get("PAGE_PICTURES", tempfile.gettempdir())) / "atom-page"
"""Where the screenshots are written."""

LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
FINISHED = f"{LAST}?.getAttribute('aria-busy') === 'false'"
LOCKED = "document.querySelector('#lock')?.hidden === false"
SHOWN = "document.querySelector('#main')?.hidden === false"


def script(request: AddRequest) -> Script:
    """A call while there are tools and no result; else a thought and markup."""
    prompt = TOKENIZER.decode(unpack_ids(request.prompt_ids).tolist())
    reply = CALL if '"look"' in prompt and "[tool]" not in prompt else THOUGHT + MARKUP
    return Script([*TOKENIZER.encode(reply, add_special_tokens=False), 1], FinishReason.EOS, 1)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a frontend that wants a key."""
    directory = tmp_path_factory.mktemp("scripted")
    checkpoint = tiny_tokenizer.checkpoint(directory, max_model_len=10_000)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    server = ServerConfig(api_key=KEY, reasoning_parser="qwen3", tool_call_parser="hermes")
    with (
        FakeCore(directory, script, max_model_len=10_000) as core,
        running_frontend(core, checkpoint, server) as client,
    ):
        yield f"http://127.0.0.1:{client.port}/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines with a small random model, which never ends its reply."""
    model = write_checkpoint(tmp_path_factory.mktemp("random") / "model", eos_token_id=None)
    with running_server("--model", str(model), *ARGS, "-dp", "2", "--api-server-count", "2") as server:
        yield server


def with_page(check: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    """Run `check` in a new browser; nothing on the page may have failed."""

    async def run() -> None:
        async with browser_page() as page:
            await check(page)
            assert page.errors == []

    asyncio.run(run())


async def ask(page: Page, text: str) -> None:
    await page.type("#prompt", text)
    await page.press("Enter")
    await page.until(f"{LAST} !== undefined")


async def text_of(page: Page, selector: str) -> str:
    text: str = await page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
    return text


async def changes(read: Callable[[], Awaitable[Any]], count: int, deadline_s: float = 20) -> list[Any]:
    """The first `count` different values."""
    seen: list[Any] = []
    async with asyncio.timeout(deadline_s):
        while len(seen) < count:
            if (value := await read()) not in seen[-1:]:
                seen.append(value)
            await asyncio.sleep(0.02)
    return seen


@pytest.mark.parametrize("name", ["logic.js", "markdown.js"])
def test_the_logic_of_the_modules(scripted: str, name: str) -> None:
    source = (Path(__file__).parent / name).read_text(encoding="utf-8")

    async def check(page: Page) -> None:
        await page.open(scripted)
        failures = await page.evaluate(f"(async () => {{ {source} }})()")
        assert failures == []

    with_page(check)


def test_without_the_key_nothing_is_shown(scripted: str) -> None:
    async def check(page: Page) -> None:
        await page.open(scripted)
        await page.until(LOCKED)
        await page.until("document.querySelector('#lock-health').textContent === 'It serves requests.'")
        assert "tiny" not in await page.evaluate("document.documentElement.outerHTML")
        await page.type("#key", "wrong")
        await page.press("Enter")
        await page.until("document.querySelector('#lock-error').textContent.includes('not one of')")
        await page.type("#key", KEY)
        await page.press("Enter")
        await page.until(SHOWN)
        assert await text_of(page, "#model") == "org/tiny"
        stored = "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]"
        assert [KEY in each for each in await page.evaluate(stored)] == [False, True, False]
        await page.evaluate("document.querySelector('#forget').click()")
        await page.until(LOCKED)
        assert await page.evaluate("sessionStorage.length") == 0

    with_page(check)


def test_reasoning_tool_calls_and_markup_are_shown_as_text(scripted: str) -> None:
    async def check(page: Page) -> None:
        await page.open(scripted)
        await page.until(LOCKED)
        await page.type("#key", KEY)
        await page.press("Enter")
        await page.until(SHOWN)
        await ask(page, "<b>hi</b>")
        await page.until(FINISHED)
        assert await text_of(page, ".message.user .text") == "<b>hi</b>"
        assert await text_of(page, ".assistant .content") == MARKUP
        assert await page.evaluate("document.querySelectorAll('.message :is(img, script, b)').length") == 0
        assert await text_of(page, ".reasoning-text") == "Only &lt;b&gt; thinks."
        folded = "[document.querySelector('.reasoning').open, document.querySelector('.reasoning').hidden]"
        assert await page.evaluate(folded) == [False, False]
        assert "tokens" in await text_of(page, ".usage")
        await page.evaluate(f"document.querySelector('#tools').value = {json.dumps(TOOLS)}")
        await ask(page, "look there")
        await page.until(f"{FINISHED} && {LAST}.querySelector('.call input')")
        assert await page.evaluate(f"{LAST}.querySelector('.call strong').textContent") == "look"
        assert json.loads(await page.evaluate(f"{LAST}.querySelector('pre').textContent")) == {
            "at": "<i>here</i>"
        }
        await page.type(".call input", "nothing is there")
        await page.evaluate("document.querySelector('#send').click()")
        await page.until(f"document.querySelectorAll('.assistant').length === 3 && {FINISHED}")
        assert await page.evaluate(f"{LAST}.querySelector('.content').textContent") == MARKUP
        assert await page.evaluate("document.title") == "org/tiny – ATOM"

    with_page(check)


def test_the_chat_streams_and_stops_and_the_charts_move(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url)
        await page.until(SHOWN)
        await page.until("document.querySelectorAll('.rank[data-state=ready]').length === 2")
        before = await page.evaluate("performance.now()")
        await page.evaluate("document.querySelector('#max-tokens').value = 4000")
        await ask(page, "count")
        lengths = await changes(
            lambda: page.evaluate(f"{LAST}.querySelector('.content').textContent.length"), 12
        )
        assert lengths == sorted(lengths) and not await page.evaluate(FINISHED)
        await changes(lambda: page.evaluate("document.querySelector('.line.decode').getAttribute('d')"), 3)
        await page.until(
            "parseFloat(document.querySelector('.chart .value').textContent.replace(',', '')) > 1"
        )
        await page.until("document.querySelectorAll('#requests tr').length === 1")
        used = (
            "[...document.querySelectorAll('.rank path.used')].map(path => path.getAttribute('d')).join('')"
        )
        await page.until(f"{used} !== ''")
        await page.until("document.querySelector('.line.p99').getAttribute('d') !== ''")
        await page.press("Escape")
        await page.until(FINISHED)
        assert (await page.evaluate(f"{LAST}.querySelector('.usage').textContent")).endswith("stopped")
        await page.until("document.querySelectorAll('#requests tr').length === 0")
        await page.evaluate("document.querySelector('#max-tokens').value = 40")
        await ask(page, "again")
        await page.until(FINISHED)
        usage = await page.evaluate(f"{LAST}.querySelector('.usage').textContent")
        assert "40 tokens" in usage and "tokens/s" in usage and usage.endswith("cut at the limit")
        assert await shift_since(page, before) < 0.02

    with_page(check)


KEPT = "JSON.parse(localStorage.getItem('atom-chats'))"
MESSAGES = "[...document.querySelectorAll('.message')].map(each => each.className.split(' ')[1]).join()"


async def click(page: Page, selector: str, times: int = 1) -> None:
    for _ in range(times):
        await page.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def test_chats_are_kept_edited_made_again_and_deleted(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url)
        await page.until(SHOWN)
        await page.evaluate("document.querySelector('#max-tokens').value = 5")
        await page.evaluate("document.querySelector('#system').value = 'Be brief.'")
        await ask(page, "first chat")
        await page.until(FINISHED)
        await ask(page, "and more")
        await page.until(f"document.querySelectorAll('.assistant').length === 2 && {FINISHED}")
        await click(page, "#new-chat")
        assert await page.evaluate(MESSAGES) == ""
        await ask(page, "second chat")
        await page.until(FINISHED)
        assert await page.evaluate(f"{KEPT}.map(({{title}}) => title)") == ["second chat", "first chat"]
        await page.open(f"{server.url}/?again")
        await page.until(f"{SHOWN} && {FINISHED}")
        assert await text_of(page, ".message.user .text") == "second chat"
        choose = "picker => { picker.selectedIndex = 1; picker.dispatchEvent(new Event('change')); }"
        await page.evaluate(f"({choose})(document.querySelector('#chats'))")
        assert await page.evaluate(MESSAGES) == "user,assistant,user,assistant"
        fields = "['max-tokens', 'system'].map(id => document.getElementById(id).value)"
        assert await page.evaluate(fields) == ["5", "Be brief."]
        await page.evaluate(f"{LAST}.dataset.old = 'yes'")
        await page.evaluate(f"{LAST}.querySelector('.regenerate').click()")
        await page.until(f"{FINISHED} && !{LAST}.dataset.old")
        assert await page.evaluate(MESSAGES) == "user,assistant,user,assistant"
        await page.evaluate("[...document.querySelectorAll('.user .link')].at(1).click()")
        await page.evaluate("document.querySelector('.editor textarea').value = 'another beginning'")
        await click(page, ".editor [type=submit]")
        await page.until(f"document.querySelectorAll('.assistant').length === 1 && {FINISHED}")
        assert await text_of(page, ".message.user .text") == "another beginning"
        assert await page.evaluate(f"{KEPT}[0].title") == "another beginning"
        await click(page, "#delete-chat")
        assert await page.evaluate(f"{KEPT}.length") == 2
        await click(page, "#delete-chat")
        assert await page.evaluate(f"{KEPT}.map(({{title}}) => title)") == ["second chat"]
        assert await text_of(page, ".message.user .text") == "second chat"

    with_page(check)


def test_a_reply_is_copied_and_a_failed_request_can_be_made_again(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url)
        await page.until(SHOWN)
        await page.evaluate("document.querySelector('#max-tokens').value = 5")
        await page.evaluate("document.querySelector('#top-p').value = 7")
        await ask(page, "hello")
        await page.until(f"{FINISHED} && {LAST}.querySelector('.error').textContent.includes('top_p')")
        await page.evaluate("document.querySelector('#top-p').value = 0.5")
        await page.evaluate(f"{LAST}.querySelector('.regenerate').click()")
        await page.until(f"{FINISHED} && {LAST}.querySelector('.error').textContent === ''")
        assert await page.evaluate(MESSAGES) == "user,assistant"
        await page.evaluate("navigator.clipboard.writeText = text => { window.copied = text; }")
        await page.evaluate(f"[...{LAST}.querySelectorAll('.actions .link')][0].click()")
        await page.until("window.copied !== undefined")
        entry = "JSON.parse(localStorage.getItem('atom-chat-' + document.querySelector('#chats').value))"
        assert await page.evaluate(f"window.copied === {entry}.entries.at(-1).content")

    with_page(check)


def test_a_request_is_explained_and_aborted_from_the_page(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url)
        await page.until(SHOWN)
        await page.evaluate("document.querySelector('#max-tokens').value = 4000")
        await ask(page, "count")
        await page.until("document.querySelector('#requests .id .link')")
        name = await text_of(page, "#requests .id")
        await page.until("document.querySelector('#requests').rows[0].cells[4].textContent !== '–'")
        queue = await page.evaluate("document.querySelector('#requests').rows[0].cells[5].textContent")
        assert queue.endswith("s")
        await click(page, "#requests .id .link")
        await page.until("document.querySelector('#report').open")
        report = json.loads(await text_of(page, "#report-text"))
        assert report["id"] == name and report["sequences"][0]["status"] == "decoding"
        await click(page, "#report-close")
        await click(page, "#requests .abort")
        assert await text_of(page, "#requests .abort") == "Sure?" and not await page.evaluate(FINISHED)
        await click(page, "#requests .abort")
        await page.until(f"{FINISHED} && {LAST}.querySelector('.usage').textContent.includes('cut')")
        await page.until("document.querySelectorAll('#requests tr').length === 0")

    with_page(check)


def test_longer_ranges_and_memory_are_shown(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url)
        await page.until(SHOWN)
        await page.until("document.querySelector('#memory').textContent.includes('GiB')")
        await page.until("document.querySelector('#responses [data-kind=\"2\"]')")
        asked = "performance.getEntriesByType('resource').filter(({name}) => name.endsWith('/1h')).length"
        await click(page, "#ranges [value='1h']")
        await page.until(f"{asked} === 1")
        assert await text_of(page, "#range-error") == ""
        line = "document.querySelector('.line.decode').getAttribute('d')"
        await changes(lambda: page.evaluate(line), 3)
        assert await page.evaluate(asked) <= 2  # not with each tick

    with_page(check)


def test_the_page_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    directory = tmp_path / "core"
    directory.mkdir()
    checkpoint = tiny_tokenizer.checkpoint(directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def check(page: Page) -> None:
        with FakeCore(directory, script) as core:
            with running_frontend(core, checkpoint, port=port):
                await page.open(f"http://127.0.0.1:{port}/")
                await page.until(f"{SHOWN} && document.querySelector('#send').textContent === 'Send'")
                await page.type("#prompt", "typed before")
            await page.until("document.querySelector('#condition').textContent === 'offline'")
            assert await page.evaluate("document.querySelector('#send').disabled")
            await page.press("Enter")
            assert await page.evaluate(MESSAGES) == ""
            with running_frontend(core, checkpoint, port=port):
                await page.until("document.querySelector('#condition').textContent === 'ready'")
                assert not await page.evaluate("document.querySelector('#send').disabled")
                assert await page.evaluate("document.querySelector('#prompt').value") == "typed before"

    with_page(check)


async def shift_since(page: Page, moment: float) -> float:
    """The browser's measure of layout shifts (CLS), from then on."""
    shift: float = await page.evaluate(
        "new Promise(resolve => new PerformanceObserver(list => resolve(list.getEntries()"
        f".filter(entry => entry.startTime > {moment} && !entry.hadRecentInput)"
        ".reduce((sum, entry) => sum + entry.value, 0)))"
        ".observe({type: 'layout-shift', buffered: true}) || setTimeout(() => resolve(0), 500))"
    )
    return shift


def test_a_dead_rank_is_shown_and_its_next_life(server: Server) -> None:
    async def check(page: Page) -> None:
        await page.open(server.url, dark=True)
        await page.until("document.querySelectorAll('.rank[data-state=ready]').length === 2")
        *_, victim = (pid for pid, line in server.children().items() if "workers.main" in line)
        os.kill(victim, signal.SIGKILL)
        dead = ".rank:not([data-state=ready])"
        await page.until(f"document.querySelector('{dead}')")
        await page.until("document.querySelector('#condition').dataset.state === 'degraded'")
        await page.until(f"document.querySelector('{dead} .rank-figures').textContent.includes('SIGKILL')")
        await page.screenshot(picture("dead-rank-dark"))
        await page.until("document.querySelectorAll('.rank[data-state=ready]').length === 2", 60)
        assert "life 1" in await text_of(page, "#ranks")
        log = await text_of(page, "#events")
        assert "killed by SIGKILL" in log and "ready (life 1)" in log

    with_page(check)


def picture(name: str) -> Path:
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES / f"{name}.png"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [2560, 1280, 820, 390])
def test_the_page_fits_and_is_legible(server: Server, width: int, dark: bool) -> None:
    name = f"{'dark' if dark else 'light'}-{width}"

    async def check(page: Page) -> None:
        await page.open(server.url, width=width, dark=dark)
        await page.until("document.querySelectorAll('.rank[data-state=ready]').length === 2")
        await ask(page, "hello")
        await asyncio.sleep(1.5)
        await page.screenshot(picture(name), whole=True)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        used = await page.evaluate("document.querySelector('#main').getBoundingClientRect().width")
        assert used > 0.9 * width
        tops = "['.chat', '#status'].map(name => document.querySelector(name).getBoundingClientRect().top)"
        chat, status = await page.evaluate(tops)
        assert chat < status if width < 720 else chat >= status
        assert await page.evaluate(f"({CUT})()") == []
        assert await page.evaluate(f"({CONTRASTS})()") == []
        background = "getComputedStyle(document.documentElement).backgroundColor"
        first = await page.evaluate(background)
        await page.evaluate("document.querySelector('#theme').click()")
        assert await page.evaluate(background) != first
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        unnamed = [node for node in nodes if is_control(node) and not node.get("name", {}).get("value")]
        assert unnamed == []

    with_page(check)


def is_control(node: dict[str, Any]) -> bool:
    roles = ("button", "textbox", "link", "spinbutton", "image", "region", "log", "table")
    return not node.get("ignored") and node.get("role", {}).get("value") in roles


# Texts that their box cuts; ids may be cut, as a click shows them.
CUT = """() => [...document.querySelectorAll('main *, header *')]
  .filter((each) => getComputedStyle(each).overflowX === 'hidden' && each.scrollWidth > each.clientWidth + 1)
  .filter((each) => each.checkVisibility() && !each.closest('.hidden, .id'))
  .map((each) => `${each.className}: ${each.textContent}`)"""

# Texts whose colour differs too little from their background (WCAG AA: 4.5).
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll('main *, header *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const pair = [light(rgb(getComputedStyle(element).color)), light(background(element))];
    const [a, b] = pair.sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) poor.push(`${element.className || element.tagName}: ${contrast.toFixed(2)}`);
  }
  return poor;
}"""
