// Who has a slot, how far and how long silent; who waits, and for how long still; what is held back or refused, and why. Shapes, never a text.

import { byId, fillList, fillTable, setText } from "./dom.js";
import * as format from "./format.js";

const ENGINES = [["Engine", true], ["State"], ["Slots", true], ["KV tokens reserved", true], ["Life", true], ["It says"]];
const SLOTS = [["Request"], ["Tokens", true], ["Age", true], ["Last token", true], ["Prompt", true], ["Whose"], ["Endpoint"], ["Life", true], ["Try", true]];
const QUEUE = [["Place", true], ["Request"], ["Will wait about", true], ["Has waited", true], ["Tokens", true], ["Whose"], ["Class"]];

export function showRequests({ slots, queue, kv_tokens: kv, engines = [], restrictions = [] }) {
  const pool = kv.pool ? `; ${format.number(kv.reserved)} of ${format.number(kv.pool)} tokens of the KV pool are reserved for them` : "";
  setText(byId("slots-words"), `${slots.in_use} of ${format.count(slots.capacity, "slot", "slots")} in use${pool}.`);
  setText(byId("queue-words"), queue.length ? `${format.count(queue.length, "request waits", "requests wait")}; ${queue.limit} may.` : "Nobody waits.");
  byId("engines").parentElement.hidden = engines.length === 0; // with one engine the sentence above says it all
  fillTable(byId("engines"), ENGINES, engines.map(engineRow));
  fillTable(byId("slots"), SLOTS, slots.holding.map(slotRow));
  fillTable(byId("queue"), QUEUE, queue.waiting.map(queueRow));
  fillList(byId("restrictions"), restrictions.map((text) => `${format.sentence(text)}.`));
}

function engineRow(one) {
  const state = one.standing === "hold" && one.state === "serving" ? "in doubt" : format.words(one.state ?? "not heard yet");
  return [
    String(one.replica),
    one.tried_alone ? `${state}, kept for one suspect` : state,
    `${one.slots.in_use} of ${one.slots.capacity}`,
    format.number(one.kv_tokens.reserved),
    String(one.generation),
    format.sentence([one.sentence, one.memory.sentence].filter(Boolean).join("; ")),
  ];
}

function slotRow(one) {
  return [
    one.request_id,
    format.number(one.tokens),
    format.seconds(one.age_s),
    one.last_token_s === null ? "none yet" : `${format.seconds(one.last_token_s)} ago`,
    format.number(one.prompt_tokens),
    one.key || "–",
    one.path,
    one.replica === null || one.replica === undefined ? String(one.generation) : `${one.generation} of engine ${one.replica}`,
    String(one.attempt),
  ];
}

function queueRow(one) {
  return [
    String(one.position + 1),
    one.request_id,
    format.seconds(one.estimated_wait_s),
    format.seconds(one.waited_s),
    format.number(one.tokens),
    one.key || "–",
    one.priority,
  ];
}
