"""The status page itself: what is in the file, and, where Chromium is installed, what it does in a browser."""

import re
from html.parser import HTMLParser

import pytest

from stages.s09_server.loopback import DryLoopback
from stages.s09_server.page_browser import CHROMIUM, DRIVER, Browser
from stages.s09_server.page_server import MODEL, PAGE, STEP, PageServer, made_up

# ---- the file --------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.inside_label = [], [], set()
        self.feed(text)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.found.append((tag, attributes))
        if "label" in self.open:
            self.inside_label.add(attributes.get("id"))
        if tag not in {"meta", "link", "input", "path"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> ends another element"


def test_nothing_comes_from_elsewhere():
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"']?(?!data:)[a-z/.]", PAGE.split("<script>")[0])
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", PAGE)
    assert "default-src 'none'" in PAGE and "connect-src 'self'" in PAGE


def test_what_a_server_says_is_never_markup():
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", PAGE)
    assert not re.findall(r"localStorage|sessionStorage|cookie", PAGE), "a key is kept in memory only"


def test_elements_are_whole_named_once_and_labelled():
    page = Elements(PAGE)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {*re.findall(r"\$\(\"([a-z-]+)\"\)", PAGE), *re.findall(r"put\(\"([a-z-]+)\"", PAGE)}
    referred = {attributes[name] for _, attributes in page.found for name in attributes if name.startswith("aria-")}
    assert used <= set(ids) and len(used) > 25
    assert {name for name in referred if name.endswith(("-title", "-caption"))} <= set(ids)
    for tag, attributes in page.found:
        if tag in {"input", "textarea", "select"}:
            assert attributes["id"] in page.inside_label, f"{attributes['id']} has no label"
        if tag == "canvas":
            assert attributes["role"] == "img" and attributes["aria-label"]


# ---- in a browser ----------------------------------------------------------------------------------------------------


LIVE = "$('state').textContent === 'live'"

if CHROMIUM and DRIVER:

    @pytest.fixture(scope="module")
    def browser(tmp_path_factory):
        browser = Browser(tmp_path_factory.mktemp("chromium"))
        yield browser
        browser.close()

    @pytest.fixture
    def server(browser):
        """A fresh server, and the page open on it."""
        server = PageServer()
        browser.open(server.url)
        yield server
        server.stop()

    def text(browser, name):
        return browser.run("return $(arguments[0]).textContent", name)

    def test_it_shows_what_the_server_says(browser, server):
        browser.until(LIVE)
        assert text(browser, "model") == MODEL and browser.run("return document.images.length") == 0
        shown = {name: text(browser, name) for name in ("running", "waiting", "kv", "hits", "preemptions", "accepted")}
        assert shown == {
            "running": "2", "waiting": "1", "kv": "15 %", "hits": "25 %", "preemptions": "3", "accepted": "–",
        }  # fmt: skip
        lines = browser.run("return [...$('requests').rows].map(row => row.innerText)")
        assert lines[0].split("\t") == ["7", "running", "30", "12 / 90", "16", "3", "0", "1.3 s"]
        assert lines[2].startswith("9\twaiting")
        server.status = made_up(uptime=102.0, tokens=5100)
        browser.until("$('rate').textContent === '50'")
        server.status["requests"] = server.status["requests"][1:2]
        browser.until("$('requests').rows.length === 1")
        assert browser.complaints() == []

    def test_the_map_has_a_colour_for_each_owner(browser, server):
        browser.until(LIVE)
        colours = browser.run(
            "const canvas = $('blocks'), {columns, size} = mapShape, k = devicePixelRatio;"
            "return [...Array(9).keys()].map(i => [...canvas.getContext('2d').getImageData("
            "(i % columns + .4) * size * k, (Math.floor(i / columns) + .4) * size * k, 1, 1).data].join())"
        )
        shared, seven, also_seven, eight, *_, findable, free = colours
        assert seven == also_seven and colours[3] == colours[4] == colours[5] and colours[6] == colours[7]
        assert len({shared, seven, eight, findable, free}) == 5
        words = "6 of 40 in use, 1 of them shared; 2 free with a findable prefix, 32 empty. 16 tokens each."
        assert text(browser, "blocks-caption") == words
        assert browser.run("return blockAt(1, 1)") == "block 1: shared by several requests"
        second_row = (
            "{left, top, cell, from, line} = stepShape; return stepAt(left + (from + 3.5) * cell, top + 1.5 * line)"
        )
        assert "request 8: chunk, 64 tokens" in browser.run("const " + second_row)

    def test_ten_thousand_blocks_and_a_full_timeline_stay_fast(browser, server):
        rows = [[number, "decode", 1] for number in range(1, 90)]
        owners = [number % 90 for number in range(10_000)]
        blocks = {"total": 10_000, "used": 9_000, "cached": 0, "free": 1_000, "every": 1, "owners": owners}
        steps = [STEP | {"number": number, "rows": rows} for number in range(700, 900)]
        server.status = made_up(blocks=blocks, steps=steps)
        browser.until("now && now.blocks.total === 10000")
        milliseconds = browser.run(
            "const draw = began => { drawBlocks(); drawSteps(); return performance.now() - began };"
            "return Math.min(...[...Array(9)].map(() => draw(performance.now())))"
        )
        assert milliseconds < 100, "two such pictures twice a second; 8 ms on a small server"
        assert browser.run("return steps.length") == 120

    def test_it_asks_for_a_key_when_the_server_does(browser, server):
        server.key = "sesame"
        browser.open(server.url)
        browser.until("!$('key-note').hidden")
        for key, outcome in (("wrong", "!$('trouble').hidden"), ("sesame", LIVE)):
            browser.run("$('key').value = arguments[0]; $('key-form').requestSubmit()", key)
            browser.until(outcome)
        assert browser.run("return $('key-note').hidden && $('trouble').hidden")

    def test_it_asks_for_a_key_when_only_the_model_is_guarded(browser, server):
        server.key, server.guards_status = "sesame", False
        browser.until(LIVE)
        browser.run("$('send').click()")
        browser.until("!$('key-note').hidden && $('answer-note').textContent.includes('no key')")
        browser.run("show(now)")
        assert browser.run("return !$('key-note').hidden"), "it stays while the page goes on"
        browser.run("$('key').value = 'sesame'; $('key-form').requestSubmit(); $('send').click()")
        browser.until("$('answer').textContent.startsWith('<b>né')")
        assert browser.run("return $('key-note').hidden")

    def test_it_says_plainly_that_the_server_is_gone_or_the_engine_dead(browser, server):
        browser.until(LIVE)
        server.status, server.code = {"error": {"message": "the engine has died: no memory"}}, 503
        browser.until("$('trouble').textContent.includes('the engine has died: no memory')")
        assert text(browser, "state") == "engine not available"
        server.stop()
        browser.until("$('trouble').textContent.startsWith('The server does not answer')")
        assert text(browser, "trouble").endswith("The last that it said: the engine has died: no memory")
        assert browser.run("return document.body.className") == "stale"
        server.status, server.code = made_up(uptime=1.0), 200
        server.start()
        browser.until(LIVE)

    def test_it_pauses_while_nobody_looks(browser, server):
        browser.until(LIVE)
        look = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
        look += "document.dispatchEvent(new Event('visibilitychange'))"
        browser.run(look, True)
        assert text(browser, "state") == "paused"
        browser.until("!asking")
        asked = server.asked
        assert not server.left.wait(0.3) and server.asked == asked  # it would ask ten times a second
        browser.run(look, False)
        browser.until(LIVE)
        assert server.asked > asked

    def test_the_model_can_be_tried_and_stopped(browser, server):
        browser.until(LIVE)
        send = "$('max-tokens').value = arguments[0]; $('send').click()"
        browser.run(send, 3)
        browser.until("$('answer-note').textContent.includes('ended by length')")
        assert text(browser, "answer") == "<b>né😀" and text(browser, "answer-note").startswith("3 tokens;")
        asked = server.questions[0]
        assert asked["model"] == MODEL and asked["stream"] and asked["messages"][0]["role"] == "user"
        browser.run(send, 101)
        browser.until("$('answer').textContent.length > 20")
        browser.run("$('stop').click()")
        browser.until("$('answer-note').textContent === 'stopped'")
        assert server.left.wait(5), "the server hears of it"

    def test_it_shows_what_a_real_server_does(browser, tiny):
        with DryLoopback(tiny("qwen2"), 5, kv_cache_mb=2, max_num_seqs=8) as real:
            browser.open(real.url)
            browser.until(LIVE)
            with real.slowly(0.2):
                browser.run("$('max-tokens').value = 30; $('send').click()")
                browser.until("lines.has(1) && now.blocks.owners.includes(1) && $('running').textContent === '1'")
            browser.until("$('answer-note').textContent.includes('ended by')")
            assert text(browser, "answer").startswith("This is a dry run")
            browser.until("lines.size === 0 && $('requests-note').textContent === 'none at the moment'")
            kinds = browser.run("return steps.flatMap(step => step.rows.map(row => row[1]))")
        assert kinds[0] == "prefill" and set(kinds[1:]) == {"decode"} and len(kinds) > 20

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_narrow_screen_need_not_be_scrolled_sideways(browser, server, scheme):
        browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.devtools("Emulation.setDeviceMetricsOverride", width=320, height=700, deviceScaleFactor=2, mobile=False)
        browser.until(LIVE)
        assert browser.run("return document.documentElement.scrollWidth") <= 320
        bright = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128")
        assert bright == (scheme == "light")
        browser.devtools("Emulation.clearDeviceMetricsOverride")
