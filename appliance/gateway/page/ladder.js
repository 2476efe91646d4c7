// The rungs, which is in force, and why that one.

import { byId, element, setText } from "./dom.js";
import * as format from "./format.js";

export function showLadder({ rungs, in_force: inForce, why, tried }) {
  setText(byId("ladder-why"), `Rung ${inForce} of 0 to ${rungs.length - 1} is in force: ${why}.`);
  byId("ladder").replaceChildren(...rungs.map((rung) => item(rung, rung.index === inForce, tried.filter((one) => one.rung === rung.index))));
}

function item(rung, current, tried) {
  const settings = [
    `context ${format.number(rung.context_length_tokens)} tokens`,
    `prefill chunk ${format.number(rung.prefill_chunk_tokens)}`,
    `${rung.max_running} running`,
    `KV ${rung.kv_dtype}`,
    `memory fraction ${rung.mem_fraction}`,
    rung.tensor_parallel > 1 && `${rung.tensor_parallel} cards`,
  ].filter(Boolean);
  const failures = tried.map((one) => `${format.words(one.cause)} ${one.times}×`).join(", ");
  return element(
    "li",
    { "aria-current": current && "true" },
    element("b", {}, `Rung ${rung.index}${current ? ", in force" : ""}`),
    `: ${settings.join(", ")}`,
    rung.gives_up && element("div", {}, element("small", {}, `Gives up: ${rung.gives_up}`)),
    rung.gains && element("div", {}, element("small", {}, `Gains: ${rung.gains}`)),
    failures && element("div", {}, element("small", {}, `Failed since it was last stable: ${failures}`)),
  );
}
