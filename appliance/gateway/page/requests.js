// Who has a slot, how far and how long silent; who waits, and for how long still. Shapes, never a text.

import { byId, fillTable, setText } from "./dom.js";
import * as format from "./format.js";

const SLOTS = [["Request"], ["Whose"], ["Endpoint"], ["Prompt", true], ["Tokens", true], ["Age", true], ["Last token", true], ["Life", true], ["Try", true]];
const QUEUE = [["Place", true], ["Request"], ["Whose"], ["Class"], ["Tokens", true], ["Has waited", true], ["Will wait about", true]];

export function showRequests({ slots, queue, kv_tokens: kv }) {
  const pool = kv.pool ? `; ${format.number(kv.reserved)} of ${format.number(kv.pool)} tokens of the KV pool are reserved for them` : "";
  setText(byId("slots-words"), `${slots.in_use} of ${format.count(slots.capacity, "slot", "slots")} in use${pool}.`);
  setText(byId("queue-words"), queue.length ? `${format.count(queue.length, "request waits", "requests wait")}; ${queue.limit} may.` : "Nobody waits.");
  fillTable(byId("slots"), SLOTS, slots.holding.map(slotRow));
  fillTable(byId("queue"), QUEUE, queue.waiting.map(queueRow));
}

function slotRow(one) {
  return [
    one.request_id,
    one.key || "–",
    one.path,
    format.number(one.prompt_tokens),
    format.number(one.tokens),
    format.seconds(one.age_s),
    one.last_token_s === null ? "none yet" : `${format.seconds(one.last_token_s)} ago`,
    String(one.generation),
    String(one.attempt),
  ];
}

function queueRow(one) {
  return [
    String(one.position + 1),
    one.request_id,
    one.key || "–",
    one.priority,
    format.number(one.tokens),
    format.seconds(one.waited_s),
    format.seconds(one.estimated_wait_s),
  ];
}
