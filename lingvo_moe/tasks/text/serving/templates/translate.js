"use strict";
const at = (id) => document.getElementById(id);
const text = at("text"), go = at("go"), result = at("result"), status = at("status");
const language = at("language"), target = at("target");
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
      for (const code of about.target_languages || []) target.add(new Option(named(code), code));
      at("targets").hidden = !target.options.length;
    }
    go.disabled = health.status !== "ready";
    say(go.disabled ? "The server is " + health.status + " \u2026" : "Ready.");
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
  if (target.options.length) asked.language += "-" + target.value;
  say("Translating \u2026");
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
