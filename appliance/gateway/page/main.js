// The page: one stream of events in, a section for each kind of them.

import { Actions } from "./actions.js";
import { showBudget } from "./budget.js";
import { Cards } from "./cards.js";
import { byId, setText } from "./dom.js";
import * as format from "./format.js";
import { Incidents } from "./incidents.js";
import { Key } from "./key.js";
import { showLadder } from "./ladder.js";
import { showRequests } from "./requests.js";
import { showSnippets } from "./snippets.js";
import { Speed } from "./speed.js";
import { Stream } from "./stream.js";
import { TryIt } from "./tryit.js";

const GOOD = ["serving"];
const BAD = ["parked", "stopped"];

let model = "";
let shownSnippets = "";
const last = {}; // event → its newest document

const key = new Key(() => stream.restart());
const actions = new Actions(key);
const incidents = new Incidents(key);
const cards = new Cards();
const speed = new Speed();
new TryIt(key, () => model);

const stream = new Stream("status/events", { event: take, stale: showStale, denied: (why) => key.ask(why) }, () => key.value);
stream.run();

const TAKERS = {
  hello: takeHello,
  now: takeNow,
  machine: budget,
  ladder: (document) => (showLadder(document), budget()),
  incidents: (document) => (incidents.take(document.incidents), speed.mark(document.incidents)),
  flight: (document) => (cards.take(document), budget()),
  series: (document) => speed.take(document),
};

function take(name, document) {
  last[name] = document;
  TAKERS[name]?.(document);
}

function takeHello({ version, key: name, admin }) {
  setText(byId("version"), `Version ${version}${name ? `, with the key ${name}` : ""}.`);
  byId("key-form").hidden = true;
  byId("key-button").hidden = !name;
  actions.allow(admin);
  incidents.mayDownload = !name || admin;
}

function takeNow(now) {
  const publication = now.publication;
  const state = publication?.state ?? "not heard yet";
  model = publication?.limits?.model_id || model || last.machine?.model || "";
  setText(byId("state"), format.words(state));
  byId("state").className = `state ${GOOD.includes(state) && now.standing === "open" ? "good" : BAD.includes(state) ? "bad" : ""}`;
  setText(byId("sentence"), format.sentence(now.sentence));
  setText(byId("model"), model ? `· ${model}` : "");
  document.title = `${format.words(state)} · ${model || "LLM appliance"}`;
  showRequests(now);
  showFacts(now);
  showAway(now);
  const snippets = `${model} ${Boolean(last.hello?.key)}`;
  if (model && snippets !== shownSnippets) showSnippets(model, Boolean(last.hello?.key));
  shownSnippets = snippets;
}

function showFacts(now) {
  const machine = last.machine ?? {};
  const facts = [
    now.publication && `generation ${now.publication.generation}`,
    machine.engine && `${machine.engine} ${machine.engine_version ?? ""}`.trim(),
    machine.restarts !== undefined && format.count(machine.restarts, "restart", "restarts"),
    `gateway up ${format.seconds(Math.floor(now.uptime_s))}`,
    now.draining && "the gateway is stopping",
  ];
  setText(byId("facts"), facts.filter(Boolean).join(" · "));
}

function showAway({ applianced: { heard_s: heardS, problem } }) {
  const away = byId("away");
  away.hidden = !problem || problem === "not asked yet";
  if (!away.hidden) setText(away, `applianced does not answer (${problem}). Memory, cards, ladder and incidents are ${heardS ? `from ${format.clock(heardS)}` : "not known"}.`);
}

// Said once, and then counted where no screen reader is told each second.
function showStale(heardMs, why) {
  document.body.classList.toggle("stale", heardMs !== null);
  const stale = byId("stale");
  stale.hidden = heardMs === null;
  if (heardMs !== null) setText(stale, `Nothing was heard since ${format.clock(heardMs / 1000)} (${why}); trying again. What stands below is of that moment.`);
}

function budget() {
  const rung = last.machine?.rung;
  const poolTokens = last.machine?.limits?.kv_tokens || 0;
  const usedTokens = cards.kvTokensUsed;
  const kvUsed = poolTokens && usedTokens !== null ? Math.min(1, usedTokens / poolTokens) : null;
  showBudget({ rung, measured: last.ladder?.measured, proof: last.machine?.proof, kvUsed, cards: cards.now });
}
