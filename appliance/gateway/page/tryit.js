// One question through the public API, with the key of whoever asks. Nothing of it is kept.

import { byId, setText } from "./dom.js";
import { messageOf } from "./stream.js";

const MOST_TOKENS = 512;

export class TryIt {
  constructor(key, modelOf) {
    this.key = key;
    this.modelOf = modelOf;
    byId("try").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(byId("try-text").value);
    });
    byId("try-stop").addEventListener("click", () => this.asking?.abort());
  }

  async ask(text) {
    this.asking = new AbortController();
    this.busy(true);
    setText(byId("try-answer"), "");
    try {
      await this.stream(text, this.asking.signal);
      setText(byId("try-status"), "The answer is complete.");
    } catch (error) {
      const said = this.asking.signal.aborted ? "Stopped." : error.message;
      byId("try-answer").append(`\n[${said}]`);
      setText(byId("try-status"), said);
    }
    this.busy(false);
  }

  busy(asking) {
    byId("try-send").disabled = asking;
    byId("try-stop").disabled = !asking;
  }

  async stream(text, signal) {
    const body = { model: this.modelOf(), stream: true, max_tokens: MOST_TOKENS, messages: [{ role: "user", content: text }] };
    const headers = { "Content-Type": "application/json", ...this.key.headers };
    const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!answer.ok) throw new Error(await messageOf(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.forEach(show);
    }
  }
}

function show(block) {
  const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
  if (!data || data === "[DONE]") return;
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message);
  const delta = event.choices?.[0]?.delta ?? {};
  byId("try-answer").append(delta.reasoning_content ?? "", delta.content ?? "");
}
