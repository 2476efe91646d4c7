// The rungs, which is in force, and why that one.

import { byId, element, setText } from "./dom.js";
import * as format from "./format.js";

export function showLadder({ rungs, in_force: inForce, why, tried, below }) {
  const place = inForce === 0 ? "Rung 0, as configured," : `Rung ${inForce} of ${rungs.length - 1}`;
  setText(byId("ladder-why"), `${place} is in force: ${why}${below ? `; ${below}` : ""}.`);
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
    rung.features_off?.length > 0 && `without ${rung.features_off.map(format.words).join(" and ")}`,
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
