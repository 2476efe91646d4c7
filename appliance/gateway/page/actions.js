// The buttons of an owner. Each asks back, and says what applianced answered.

import { byId, element, setText } from "./dom.js";
import { messageOf } from "./stream.js";

const BUTTONS = [
  ["drain", "Drain", "Drain the engine?", "What runs may finish, nothing new begins, and the engine stops until somebody resumes it."],
  ["resume", "Resume", "Start the engine again?", "For an appliance that is parked or drained."],
  ["restart", "Restart", "Restart the engine?", "Answers under way may finish; requests that come meanwhile wait for the next engine."],
  ["original", "Original rung", "Go back to the original rung?", "The engine is restarted on the setting that is configured. If that one crashed, it may crash again."],
];

export class Actions {
  constructor(key) {
    this.key = key;
    this.host = byId("actions");
    this.said = element("span", { role: "status" });
    for (const [path, label, title, words] of BUTTONS) {
      const button = element("button", { type: "button" }, label);
      button.addEventListener("click", async () => (await confirmed(title, words)) && this.perform(path));
      this.host.append(button, " ");
    }
    this.host.append(this.said);
  }

  allow(allowed) {
    this.host.hidden = !allowed;
  }

  async perform(path) {
    setText(this.said, "asked …");
    try {
      const answer = await fetch(`admin/${path}`, { method: "POST", headers: this.key.headers });
      setText(this.said, answer.ok ? ((await answer.json()).sentence ?? "accepted") : await messageOf(answer));
    } catch (error) {
      setText(this.said, error.message);
    }
    setTimeout(() => setText(this.said, ""), 10_000);
  }
}

function confirmed(title, words) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-words"), words);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
