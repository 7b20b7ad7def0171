"use strict";
const at = (id) => document.getElementById(id);
const text = at("text"), go = at("go"), result = at("result"), status = at("status");
let messages = [], running = null, model = "";

function say(message, bad) {
  status.textContent = message;
  status.classList.toggle("bad", Boolean(bad));
}

async function watch() {
  try {
    const health = await (await fetch("health")).json();
    at("model").textContent = health.model.model || "";
    const ready = health.status === "ready";
    if (ready) model = (await (await fetch("v1/models")).json()).data[0].id;
    go.disabled = !ready;
    say(ready ? "Ready." : "The server is " + health.status + " \u2026");
    if (ready) return;
  } catch (error) {
    say("The server does not answer.", true);
  }
  setTimeout(watch, 1000);
}

function shown(role, content) {
  const line = document.createElement("div");
  line.dir = "auto";
  line.className = role;
  line.textContent = content;
  result.append(line);
  result.scrollTop = result.scrollHeight;
  return line;
}

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}

async function send() {
  const asked = text.value.trim();
  if (go.disabled || running || !asked) return;
  const mine = running = new AbortController();
  const before = messages;
  messages = [...messages, { role: "user", content: asked }];
  shown("user", asked);
  const line = shown("assistant", "");
  text.value = "";
  say("Answering \u2026");
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, messages, stream: true, temperature: 0 }),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    let reason = "";
    for await (const chunk of chunks(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      line.textContent += chunk.choices[0].delta.content || "";
      reason = chunk.choices[0].finish_reason;
      result.scrollTop = result.scrollHeight;
    }
    line.classList.toggle("cut", reason === "length");
    messages = [...messages, { role: "assistant", content: line.textContent }];
    say("Ready.");
  } catch (error) {
    if (running !== mine) return;
    messages = before;
    say(error.message, true);
  } finally {
    if (running === mine) running = null;
  }
}

go.addEventListener("click", send);
at("new").addEventListener("click", () => {
  if (running) running.abort();
  running = null;
  messages = [];
  result.replaceChildren();
  say("Ready.");
  text.focus();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
watch();
