// The timeline: cause, chain, what was refuted, what was done, and how long until it served again.

import { byId, copyButton, element, setText } from "./dom.js";
import * as format from "./format.js";
import { messageOf } from "./stream.js";

export class Incidents {
  constructor(key) {
    this.key = key;
    this.shown = new Map(); // id → [what it was made of, its element]
    this.mayDownload = false;
  }

  take(incidents) {
    setText(byId("incidents-words"), incidents.length ? "" : "Nothing has crashed here.");
    const items = incidents.map((incident) => this.itemOf(incident));
    const list = byId("incidents");
    items.forEach((item, index) => list.children[index] !== item && list.insertBefore(item, list.children[index] ?? null));
    while (list.children.length > items.length) list.lastChild.remove();
    const known = new Set(incidents.map((incident) => incident.incident_id));
    for (const id of this.shown.keys()) if (!known.has(id)) this.shown.delete(id);
  }

  // An incident that has not changed keeps its element: whoever reads it is not thrown out.
  itemOf(incident) {
    const made = JSON.stringify(incident);
    const [before, item] = this.shown.get(incident.incident_id) ?? [];
    if (before === made) return item;
    const fresh = this.make(incident);
    if (item?.firstChild.open) fresh.firstChild.open = true;
    item?.replaceWith(fresh);
    this.shown.set(incident.incident_id, [made, fresh]);
    return fresh;
  }

  make(incident) {
    const { diagnosis, action } = incident;
    const summary = element(
      "summary",
      {},
      `${format.moment(incident.time_s)} `,
      element("span", { class: "cause" }, diagnosis.cause),
      ` → ${format.words(action.kind)}, ${recovery(incident)} `,
      element("small", {}, incident.incident_id),
    );
    const details = element("details", {}, summary);
    // Made when it is opened: fifty incidents with their chains are for nobody to see.
    details.addEventListener("toggle", () => details.open && details.children.length === 1 && details.append(...this.inside(incident)));
    return element("li", {}, details);
  }

  inside(incident) {
    const { diagnosis, action } = incident;
    return [
      element("p", {}, `${diagnosis.sentence} `, element("small", {}, `Confidence: ${diagnosis.confidence}.`)),
      element("p", {}, `${where(incident)}. The appliance ${action.basis}; ${recovery(incident)}.`),
      ...part("Chain", diagnosis.chain.length > 0 && chainTable(diagnosis.chain)),
      ...part("Refuted", list(diagnosis.refuted.map((one) => [element("b", {}, one.cause), `: ${one.reason}`]))),
      ...part("What to do", list(diagnosis.remedies.map((one) => [one]))),
      ...part("Settings to move", list(diagnosis.safer_config.map(([name, value]) => [`${name} = ${value}`]))),
      element("div", { class: "bar" }, element("span", {}, copyButton("Copy report as Markdown", () => this.report(incident)), " ", this.bundleButton(incident))),
    ];
  }

  async report(incident) {
    const answer = await fetch(`status/incident.md?id=${incident.incident_id}`, { headers: this.key.headers });
    if (!answer.ok) throw new Error(await messageOf(answer));
    return answer.text();
  }

  bundleButton(incident) {
    if (!this.mayDownload) return null;
    const button = element("button", { type: "button" }, "Download bundle");
    button.addEventListener("click", () => this.download(incident, button));
    return button;
  }

  async download(incident, button) {
    const answer = await fetch(`status/incident.tar.zst?id=${incident.incident_id}`, { headers: this.key.headers });
    if (!answer.ok) return setText(button, await messageOf(answer));
    const link = element("a", { href: URL.createObjectURL(await answer.blob()), download: `${incident.incident_id}.tar.zst` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }
}

function recovery({ recovered_s: recoveredS }) {
  return recoveredS === null ? "not serving again yet" : `serving again after ${format.seconds(recoveredS)}`;
}

function where(incident) {
  const engine = `${incident.engine} ${incident.engine_version}`.trim();
  const when = incident.phase === "start" ? "while starting" : `after ${format.seconds(incident.uptime_s)} of service`;
  const rung = incident.rung_before === incident.rung_after ? `rung ${incident.rung_before}` : `rung ${incident.rung_before} → ${incident.rung_after}`;
  return `${engine} with ${incident.model}, generation ${incident.generation}, ${when}, ${format.count(incident.requests, "request", "requests")} in flight, ${rung}`;
}

const part = (title, content) => (content ? [element("h3", {}, title), content] : []);
const list = (items) => items.length > 0 && element("ul", {}, ...items.map((content) => element("li", {}, ...content)));

function chainTable(chain) {
  const rows = chain.map(({ role, citation }) =>
    element(
      "tr",
      {},
      element("td", {}, format.words(role)),
      element("td", {}, citation.line ? `${citation.source}:${citation.line}` : citation.source),
      element("td", {}, citation.time_s === null ? "–" : format.clock(citation.time_s)),
      element("td", {}, element("code", {}, citation.text)),
    ),
  );
  const head = element("tr", {}, ...["Role", "Where", "When", "Line"].map((title) => element("th", { scope: "col" }, title)));
  const table = element("table", {}, element("caption", { class: "hidden" }, "From the root to what people saw"), element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Chain" }, table);
}
