"""The page to try a model: one file without external parts, light or dark, for any script and direction."""

import base64
import hashlib

from lingvo_moe.core.pages.style import STYLE

_STYLE = f"""{STYLE}
h1 {{ font-size: 1.7rem }} #model {{ margin-bottom: 1.2rem }}
.sides {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem }}
label, .sides h2, button, select, .row span {{
  font: .95rem/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }}
label, .sides h2 {{ display: block; color: var(--soft); margin: 0 0 .3rem }}
textarea, #result {{
  width: 100%; min-height: 15rem; padding: .7rem .8rem; font: inherit; color: inherit; background: none;
  border: 1px solid var(--soft); border-radius: .3rem; unicode-bidi: plaintext; text-align: start }}
textarea {{ resize: vertical }}
#result {{ border-color: var(--rule); overflow-wrap: anywhere }}
#result div {{ min-height: 1.55em; text-align: start }}
#result .cut::after {{ content: " …"; color: var(--bad) }}
.row {{ grid-column: 1 / -1; display: flex; flex-wrap: wrap; align-items: center; gap: .6rem 1rem }}
@media (max-width: 43rem) {{ section {{ order: 1 }} textarea, #result {{ min-height: 9rem }} }}
.row label {{ display: inline; margin: 0 }}
button, select {{ padding: .4rem 1.1rem; border-radius: .3rem; border: 1px solid var(--soft) }}
select {{ background: var(--paper); color: inherit }}
button {{ background: var(--ink); color: var(--paper); border-color: transparent; cursor: pointer }}
button:disabled {{ opacity: .55; cursor: default }}
:focus-visible {{ outline: 3px solid var(--first); outline-offset: 2px }}
[hidden] {{ display: none !important }}
#status, #keys {{ color: var(--soft) }} #status.bad {{ color: var(--bad) }}
"""

_SCRIPT = """
"use strict";
const at = (id) => document.getElementById(id);
const text = at("text"), go = at("go"), result = at("result"), status = at("status"), language = at("language");
let running = null;

function say(message, bad) {
  status.textContent = message;
  status.classList.toggle("bad", Boolean(bad));
}

function named(code) {
  try {
    /* throws where a code is none of BCP 47 */
    const name = new Intl.DisplayNames(["en"], { type: "language", fallback: "none" }).of(code.replaceAll("_", "-"));
    return name ? name + ", " + code : code;
  } catch (error) {
    return code;
  }
}

async function watch() {
  try {
    const health = await (await fetch("health")).json();
    const about = health.model;
    at("model").textContent = [about.model, about.step === undefined ? "" : "step " + about.step]
      .filter(Boolean).join(", ");
    if (about.languages.length && !language.options.length) {
      for (const code of about.languages) language.add(new Option(named(code), code));
      at("languages").hidden = false;
    }
    go.disabled = health.status !== "ready";
    say(go.disabled ? "The server is " + health.status + " \\u2026" : "Ready.");
    if (!go.disabled) return;
  } catch (error) {
    say("The server does not answer.", true);
  }
  setTimeout(watch, 1000);
}

async function translate() {
  if (go.disabled) return;
  if (running) running.abort();
  const mine = running = new AbortController();
  const asked = { text: text.value };
  if (language.options.length) asked.language = language.value;
  say("Translating \\u2026");
  result.setAttribute("aria-busy", "true");
  const start = performance.now();
  try {
    const response = await fetch("translate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked),
      signal: mine.signal,
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    result.replaceChildren(...answer.translations.map((line, i) => {
      const shown = document.createElement("div");
      shown.dir = "auto";
      shown.textContent = line;
      shown.classList.toggle("cut", answer.truncated[i]);
      return shown;
    }));
    const cut = answer.truncated.filter(Boolean).length;
    const seconds = ((performance.now() - start) / 1000).toFixed(2);
    const number = answer.translations.length;
    say(number + (number === 1 ? " line in " : " lines in ") + seconds + " s." +
      (cut ? " " + cut + " too long: the end was not translated." : ""), cut > 0);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  } finally {
    if (running === mine) {
      running = null;
      result.removeAttribute("aria-busy");
    }
  }
}

go.addEventListener("click", translate);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    translate();
  }
});
watch();
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Translate</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Translate</h1>
<p class="note" id="model">&nbsp;</p>
<div class="sides">
<div>
<label for="text">Text, a line at a time</label>
<textarea id="text" dir="auto" autofocus spellcheck="false" aria-describedby="keys"></textarea>
</div>
<section aria-labelledby="title">
<h2 id="title">Translation</h2>
<div id="result" role="region" aria-labelledby="title" aria-live="polite" tabindex="0"></div>
</section>
<div class="row">
<button id="go" disabled>Translate</button>
<span id="languages" hidden><label for="language">from</label> <select id="language"></select></span>
<span id="keys">or Ctrl+Enter</span>
<span id="status" role="status"></span>
</div>
</div>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


# What the browser lets the page do: its own style and script, and requests to this server.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
