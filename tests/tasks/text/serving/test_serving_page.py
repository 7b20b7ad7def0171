"""The page for trying a model, in a real browser."""

import asyncio
from types import SimpleNamespace

from headless_chromium import Tab, needs_chromium, opened_tab
from local_server import Capitals, Echo, running

from lingvo_moe.tasks.text.serving import service

TEXT = "größer\n\nשלום <b>עולם</b>\nيوم a\n\u2028 a long one"


async def _lines(tab: Tab) -> list[list[str]]:
    """Text, direction and class of each line of the result."""
    return await tab.Eval(
        "[...document.querySelectorAll('#result div')]"
        ".map(e => [e.textContent, getComputedStyle(e).direction, e.className])"
    )


async def _contrasts(tab: Tab) -> list[float]:
    """WCAG contrast ratios of the text of several elements with its background."""
    return await tab.Eval(
        """(() => {
          const light = (css) => {
            const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
              .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = (e) => {
            const css = getComputedStyle(e).backgroundColor;
            return css === 'rgba(0, 0, 0, 0)' ? behind(e.parentElement) : css;
          };
          return ['h1', '#model', 'textarea', '#result', '#go', '#keys', '#status', 'label'].map(name => {
            const e = document.querySelector(name);
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          });
        })()"""
    )


async def _colours(tab: Tab, scheme: str) -> str:
    """Background colour under a preferred colour scheme; also checks that all text is readable."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    await tab.Call("Emulation.setEmulatedMedia", features=[feature])
    assert min(await _contrasts(tab)) >= 4.5
    return await tab.Eval("getComputedStyle(document.body).backgroundColor")


@needs_chromium
def test_the_page_translates_by_keyboard_alone():
    async def work(port: int) -> None:
        url = f"http://127.0.0.1:{port}/"
        async with opened_tab() as tab:
            await tab.Open(url)
            await tab.Until("!document.getElementById('go').disabled")
            assert "mt.Test, step 3" in await tab.Eval("document.body.innerText")
            assert await tab.Eval("document.activeElement.id") == "text"
            assert await tab.Eval("document.getElementById('languages').hidden")
            await tab.Type(TEXT)
            await tab.Press("Enter", ctrl=True)
            await tab.Until("document.querySelectorAll('#result div').length === 5")
            assert await _lines(tab) == [
                ["GRÖSSER", "ltr", ""],
                ["", "ltr", ""],
                ["שלום <B>עולם</B>", "rtl", ""],
                ["يوم A", "rtl", ""],
                ["  A LONG ONE", "ltr", "cut"],
            ]
            status = "document.getElementById('status')"
            said = await tab.Eval(f"{status}.textContent")
            assert said.startswith("5 lines in ")
            assert said.endswith("1 too long: the end was not translated.")
            assert (
                await tab.Eval("document.getElementById('text').value") == TEXT
            )  # no new line in it

            await tab.Eval("document.getElementById('text').select()")
            await tab.Type("\n" * 200)
            await tab.Press("Tab")  # to the result,
            await tab.Press("Tab")  # and the button
            assert await tab.Eval("document.activeElement.id") == "go"
            await tab.Press("Enter")
            await tab.Until(
                f"{status}.className === 'bad' && {status}.textContent.includes('at most')"
            )
            assert len(await _lines(tab)) == 5  # what there was stays

            assert await _colours(tab, "dark") != await _colours(tab, "light")
            for width in (320, 1400):
                size = {"width": width, "height": 600, "deviceScaleFactor": 1, "mobile": False}
                await tab.Call("Emulation.setDeviceMetricsOverride", **size)
                assert await tab.Eval("document.documentElement.scrollWidth") <= width
            assert {u for u in tab.requested if not u.startswith("data:")} == {
                url,
                url + "health",
                url + "translate",
            }

    with running(Capitals()) as it:
        asyncio.run(work(it.port))


@needs_chromium
def test_the_page_asks_for_the_language_where_the_model_does():
    async def work(port: int) -> None:
        async with opened_tab() as tab:
            await tab.Open(f"http://127.0.0.1:{port}/")
            await tab.Until("!document.getElementById('go').disabled")
            await tab.Type("a")
            shown = await tab.Eval(
                "[...document.getElementById('language').options].map(o => o.text)"
            )
            assert shown == ["German, de", "Finnish, fi", "Traditional Chinese, zh_Hant", "made up"]
            await tab.Eval("document.getElementById('language').value = 'fi'")
            await tab.Eval("document.getElementById('go').click()")
            await tab.Until("document.querySelector('#result div')")
            assert await _lines(tab) == [["Afi", "ltr", ""]]

    with running(Capitals(("de", "fi", "zh_Hant", "made up"))) as it:
        asyncio.run(work(it.port))


@needs_chromium
def test_the_page_asks_for_both_languages_of_a_model_from_any_to_any():
    async def work(port: int) -> None:
        async with opened_tab() as tab:
            await tab.Open(f"http://127.0.0.1:{port}/")
            await tab.Until("!document.getElementById('go').disabled")
            await tab.Type("a")
            for side, code in (("language", "fra_Latn"), ("target", "zho_Hant")):
                await tab.Eval(f"document.getElementById('{side}').value = '{code}'")
            shown = await tab.Eval("document.getElementById('target').innerText")
            assert "French" in shown
            await tab.Eval("document.getElementById('go').click()")
            await tab.Until("document.querySelector('#result div')")
            assert await _lines(tab) == [["Afra_Latn-zho_Hant", "ltr", ""]]

    model = Capitals(("eng_Latn", "fra_Latn", "zho_Hant"))
    model.by_direction = True
    with running(model) as it:
        asyncio.run(work(it.port))


@needs_chromium
def test_a_conversation_is_shown_as_it_comes(monkeypatch):
    class Chatting(Echo):
        """Has a vocabulary whose conversations are the number of their messages."""

        def About(self, line):
            return {"tokens": 2, "prompt_tokens": 0, "finish_reason": "stop"}

    ids = {"Ids": lambda messages: [len(messages)]}
    monkeypatch.setattr(service, "Chat", lambda vocabulary: SimpleNamespace(**ids))

    async def work(port: int) -> None:
        async with opened_tab() as tab:
            await tab.Open(f"http://127.0.0.1:{port}/")
            await tab.Until("!document.getElementById('go').disabled")
            for number, text in enumerate(("größer", "שלום")):
                await tab.Type(text)
                await tab.Press("Enter")
                lines = f"document.querySelectorAll('#result div').length === {2 * number + 2}"
                ready = "document.getElementById('status').textContent === 'Ready.'"
                await tab.Until(f"{lines} && {ready}")
            assert await _lines(tab) == [
                ["größer", "ltr", "user"],
                [" <b>1 !", "ltr", "assistant"],
                ["שלום", "rtl", "user"],
                [" <b>3 !", "ltr", "assistant"],
            ]
            await tab.Eval("document.getElementById('new').click()")
            assert await _lines(tab) == []

    vocabulary = SimpleNamespace(chat_template="any", Decode=lambda ids: f"<b>{ids[0]} !")
    with running(Chatting(vocabulary=vocabulary)) as it:
        asyncio.run(work(it.port))
