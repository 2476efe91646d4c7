// The memory chain as a picture: what was planned, what starts measured, what is in use; the same as a table.

import { byId, element } from "./dom.js";
import * as format from "./format.js";

// Class, name, and the bytes of a term in a plan and as measured.
function termsOf(plan, measured, kvUsed, proof) {
  const pool = measured?.kv_pool_bytes ?? plan.kv_pool_bytes;
  const used = kvUsed === null ? null : Math.round(pool * kvUsed);
  const peak = plan.activation_peak_bytes;
  const fixed = termBytes(plan, ["fixed", "graphs", "workspaces"]);
  return [
    ["weights", "Weights", plan.weight_bytes, measured?.weight_bytes],
    ["state-memory", "Linear-attention state", plan.linear_state_bytes, measured?.linear_state_bytes],
    ["kv-used", "KV pool, used", null, used],
    ["kv-free", "KV pool, free", plan.kv_pool_bytes, used === null ? measured?.kv_pool_bytes : pool - used],
    ["graphs", "Graphs and workspaces", fixed, measured?.fixed_bytes],
    ["peak", "Peak of a prefill", peak, proof?.peak_bytes ?? measured?.activation_peak_bytes],
    ["headroom", "Headroom left", Math.max(0, plan.headroom_bytes - peak - (fixed ?? 0)), proof?.left_bytes],
  ];
}

const termBytes = (plan, names) => plan.terms?.find((term) => names.some((name) => term.name.toLowerCase().includes(name)))?.size_bytes ?? null;

let shown = "";

export function showBudget(facts) {
  const host = byId("budget");
  const made = JSON.stringify(facts);
  if (made === shown) return; // it is asked for every second
  shown = made;
  const { rung, measured, proof, kvUsed, cards } = facts;
  const plan = rung?.plan;
  if (!plan) {
    host.replaceChildren(element("p", {}, "There is no plan for this engine: what it needs is not known. `appliancectl plan` says what is missing."));
    return;
  }
  const terms = termsOf(plan, measured, kvUsed, proof);
  const most = Math.max(plan.free_at_start_bytes, ...cards.map((card) => card.totalBytes ?? 0));
  host.replaceChildren(
    bar("Planned, of each card", terms.map(([kind, name, planned]) => [kind, name, planned]), plan.free_at_start_bytes, most),
    bar("Measured at the last start and in the proof run", terms.map(([kind, name, , seen]) => [kind, name, seen]), plan.free_at_start_bytes, most),
    ...cards.map((card) => bar(`Now, ${card.name}`, [["other", "in use", card.usedBytes]], card.totalBytes, most)),
    table(terms, plan, cards),
    element("p", {}, proof?.detail ?? ""),
  );
}

function bar(name, parts, edgeBytes, mostBytes) {
  const known = parts.filter(([, , size]) => size > 0);
  const said = known.map(([, part, size]) => `${part} ${format.bytes(size)}`).join(", ") || "nothing measured yet";
  const chain = element("div", { class: "chain", role: "img", "aria-label": `${name}: ${said}; the red line is at ${format.bytes(edgeBytes)}` });
  for (const [kind, part, size] of known) {
    const piece = element("span", { class: kind, title: `${part}: ${format.bytes(size)}` });
    piece.style.flex = `0 0 ${(100 * size) / mostBytes}%`;
    chain.append(piece);
  }
  const edge = element("span", { class: "edge" });
  edge.style.left = `${(100 * edgeBytes) / mostBytes}%`;
  chain.append(edge);
  return element("div", {}, element("p", { class: "chain-name" }, name), chain);
}

function table(terms, plan, cards) {
  const swatch = (kind) => element("span", { class: `swatch ${kind}` });
  const row = (kind, name, planned, seen) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, swatch(kind), name),
      element("td", { class: "number" }, format.bytes(planned)),
      element("td", { class: "number" }, format.bytes(seen)),
    );
  const head = element("tr", {}, ...["Term", "Planned", "Measured"].map((title, index) => element("th", { scope: "col", class: index && "number" }, title)));
  const used = cards.reduce((sum, card) => sum + (card.usedBytes ?? 0), 0);
  return element(
    "table",
    {},
    element("caption", { class: "hidden" }, "Terms of the memory chain, planned and measured"),
    element("thead", {}, head),
    element(
      "tbody",
      {},
      ...terms.map((term) => row(...term)),
      row("red", "Red line: free at the start", plan.free_at_start_bytes, null),
      cards.length ? row("other", "In use now, all cards", null, used) : null,
    ),
  );
}
