// The API key of whoever looks: for this tab, or for this browser where they say so. Sent in a header, never in an address.

import { byId, setText } from "./dom.js";

const NAME = "llm-appliance-key";

export class Key {
  constructor(changed) {
    this.value = sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.use(byId("key-input").value.trim(), byId("key-keep").checked);
      changed();
    });
    byId("key-button").addEventListener("click", () => this.ask("Another key: what is shown and what may be done follow from it."));
  }

  use(value, keep) {
    this.value = value;
    sessionStorage.setItem(NAME, value);
    if (keep) localStorage.setItem(NAME, value);
    else localStorage.removeItem(NAME);
    byId("key-input").value = "";
    byId("key-form").hidden = true;
  }

  ask(why) {
    setText(byId("key-why"), why);
    byId("key-form").hidden = false;
    byId("key-input").focus();
  }

  get headers() {
    return this.value ? { Authorization: `Bearer ${this.value}` } : {};
  }
}
