import { html, useMemo } from "/console/vendor/preact-htm.js";
import { bytes, count, percent, rate, seconds, time } from "/console/format.js";
import { Answered, Cards, Decisions, Facts, ModelLink, Table, useAnswer, useAnswers } from "/console/parts.js";
import { RelayPicture } from "/console/relay_picture.js";

export const links = (models) =>
  models.map(
    (model, place) => html`${place ? ", " : ""}${model.includes("/") ? html`<${ModelLink} id=${model} />` : model}`,
  );
const addressOf = (...parts) => `#/cluster/${parts.map(encodeURIComponent).join("/")}`;

const failed = (error) => error && html`<span class="error"> failed to load: ${error}</span>`;
const SLOT_COLUMNS = [
  [
    "Worker",
    (slot) => (slot.instance ? html`<a href=${addressOf("instance", slot.instance)}>${slot.worker}</a>` : slot.worker),
  ],
  [
    "Slot",
    (slot) =>
      html`<span class=${`state ${slot.state}`}>${slot.state}${slot.state === "loading" ? `, ${percent(slot.loaded)}` : ""}</span>`,
  ],
  ["Model", (slot) => [links(slot.models), failed(slot.error)]],
  ["Roles", (slot) => slot.roles.join(", ")],
  ["Running", (slot) => slot.num_running, "number"],
  ["KV used", (slot) => percent(slot.kv_used), "number"],
  ["Size", (slot) => bytes(slot.size_bytes), "number"],
  ["Device", (slot) => slot.device],
  ["Labels", (slot) => slot.labels.join(", ")],
  ["Held back by", (slot) => slot.bottleneck && html`${slot.bottleneck}<div class="dim">${slot.advice}</div>`],
];
const COPY_COLUMNS = [
  ["Model", (copy) => links(copy.models)],
  ["Verified", (copy) => percent(copy.verified), "number"],
  ["Size", (copy) => bytes(copy.pack_bytes), "number"],
  ["Used by", (copy) => copy.num_pins, "number"],
];

function memoryOf({ arena_bytes, arena_free_bytes, failure_domain }) {
  if (arena_bytes === undefined) return "Its param-store does not report.";
  const used = `Memory: ${bytes(arena_bytes - arena_free_bytes)} of ${bytes(arena_bytes)} used`;
  return failure_domain ? `${used}, domain ${failure_domain}` : used;
}

function Host({ host }) {
  return html`<section class="plot"><h3>${host.id}</h3>
    <p class="dim">${memoryOf(host)}</p>
    <${Table} label=${`Slots of ${host.id}`} columns=${SLOT_COLUMNS} rows=${host.slots}>
      No worker: start one with <code>torchrelay join</code>.<//>
    <h3>Copies in memory</h3>
    <${Table} label=${`Copies of ${host.id}`} columns=${COPY_COLUMNS} rows=${host.memory ?? []}>None.<//>
    ${host.disk?.length > 0 && html`<h3>Copies on disk</h3><p>${links(host.disk)}</p>`}</section>`;
}

const UNDER_WAY = ["planned", "running", "slow"];
const RELAY_COLUMNS = [
  ["Model", (relay) => links(relay.models)],
  ["From", (relay) => relay.sources.join(", ") || "the platform"],
  ["To", (relay) => relay.target || "a host"],
  [
    "State",
    (relay) =>
      relay.target ? html`<a href=${addressOf("relay", relay.target, relay.pack)}>${relay.state}</a>` : relay.state,
  ],
  ["Verified", (relay) => percent(relay.verified), "number"],
  ["Size", (relay) => bytes(relay.pack_bytes), "number"],
  ["MB/s", (relay) => rate(relay.bytes_per_s / 1e6), "number"],
  ["Left", (relay) => (relay.left_s ? seconds(relay.left_s) : ""), "number"],
  ["Reason", (relay) => relay.reason],
];

// Relays under way as pictures, one of each pack, and all of them as a table.
export function Relays({ last }) {
  const underWay = last.relays.filter(({ state }) => UNDER_WAY.includes(state));
  const groups = new Map();
  for (const relay of underWay) {
    const key = `${relay.pack} ${relay.models}`;
    groups.set(key, [...(groups.get(key) ?? []), relay]);
  }
  const byPack = [...groups];
  const picture = ([key, group]) =>
    html`
    <${RelayPicture} key=${key} models=${links(group[0].models)} relays=${group} />`;
  return html`${byPack.map(picture)}
    <${Table} label="Relays" columns=${RELAY_COLUMNS} rows=${last.relays}>
      ${
        last.num_models
          ? html`No weights are on their way. To see a relay, call a model at zero in
        ${" "}<a href="#/playground">the playground</a>.`
          : html`There is no model yet: <a href="#/models">upload one</a>.`
      }<//>`;
}

// Loading instances that compute prompts already: a pair is a loading worker and a loaded one that takes prompts over from it.
const pairsOf = (instances) =>
  instances.flatMap((each) => {
    if (each.moves.length) return each.moves.map(([worker, num, savedS]) => ({ ...each, to: worker, num, savedS }));
    return each.state === "loading" && each.num_running ? [{ ...each, to: "", num: 0, savedS: 0 }] : [];
  });
const PAIR_COLUMNS = [
  ["Loading worker", (pair) => html`<a href=${addressOf("instance", pair.id)}>${pair.worker}</a>`],
  ["State", (pair) => (pair.state === "loading" ? `loading, ${percent(pair.loaded)}` : pair.state)],
  ["Paired with", (pair) => pair.to || "none yet"],
  ["Model", (pair) => links(pair.models)],
  ["Prompts moved", (pair) => count(pair.num), "number"],
  ["Computation saved", (pair) => seconds(pair.savedS), "number"],
];

function Instance({ id, last }) {
  const instance = last.instances.find((each) => each.id === id);
  if (!instance) return html`<p>The instance is gone. <a href="#/events">Events</a> of the kind instance tell why.</p>`;
  const facts = {
    Model: links(instance.models),
    Worker: instance.worker,
    State: `${instance.state} for ${seconds(instance.in_state_s)}`,
    Roles: instance.roles.join(", "),
    Running: count(instance.num_running),
    ...(instance.roles_reason && { "Why these roles": instance.roles_reason }),
    ...(instance.moves.length > 0 && {
      "Prompts moved to": instance.moves.map(([worker, num]) => `${worker}: ${count(num)}`).join(", "),
    }),
  };
  return html`<${Facts} facts=${facts} />
    <${WhyInstance} id=${id} models=${instance.models} />`;
}

// Models with the same files share instances, and each decision is kept with the model that it was made for.
function WhyInstance({ id, models }) {
  const answer = useAnswers(
    models.map((model) => `/v1/explain?model=${encodeURIComponent(model)}`),
    5000,
  );
  const ofInstance = (answers) =>
    answers
      .flatMap(({ decisions }) => decisions)
      .filter(({ subject }) => subject === id)
      .sort((a, b) => a.at_unix_us - b.at_unix_us);
  return html`<h2>Why</h2><${Answered} answer=${answer}>${(answers) =>
    html`<${Decisions} decisions=${ofInstance(answers)}>
    The scheduler keeps no decision about it any more: it keeps the last 100 of a model, since it began.<//>`}<//>`;
}

const RELAY_EVENT_COLUMNS = [
  ["Time, UTC", (event) => time(event.at_unix_us / 1e6), "time"],
  ["Event", (event) => event.kind],
  ["Model", (event) => event.model],
  ["Reason", (event) => event.reason],
];

function Relay({ target, pack, last }) {
  const relay = last.relays.find((each) => each.target === target && each.pack === pack);
  const since = useMemo(() => Math.floor(Date.now() / 1000) - 3600, []);
  const answer = useAnswer(`/v1/events?kind=relay&limit=1000&since=${since}`, 5000);
  const eventsOf = ({ data }) => data.filter((event) => event.store_id === target && event.pack_id === pack).reverse();
  return html`${relay ? html`<${Table} label="Relays" columns=${RELAY_COLUMNS} rows=${[relay]} />` : html`<p class="dim">It has ended.</p>`}
    <h2>Why</h2><${Answered} answer=${answer}>${(data) => html`<${Table} label="Events of the relay" columns=${RELAY_EVENT_COLUMNS} rows=${eventsOf(data)}>Nothing in the last hour.<//>`}<//>`;
}

function Detail({ path: [kind, name, pack], last }) {
  return html`<p><a href="#/cluster">The cluster</a></p><h2>${kind === "relay" ? `Relay to ${name}` : `Instance ${name}`}</h2>
    ${kind === "relay" ? html`<${Relay} target=${name} pack=${pack} last=${last} />` : html`<${Instance} id=${name} last=${last} />`}`;
}

export function Cluster({ samples, isAdmin, path }) {
  const last = samples.at(-1);
  if (!last) return html`<p class="dim">Waiting for the first figures.</p>`;
  if (!isAdmin)
    return html`<p class="empty">
      Hosts are the operator's: sign in with the admin key to see them.
      ${" "}<a href="#/models">Models</a> shows your instances.</p>
    <h2>Relays</h2><${Relays} last=${last} />`;
  if (path.length > 1)
    return html`<${Detail} key=${path.join("/")} path=${path.map(decodeURIComponent)} last=${last} />`;
  const slots = last.hosts.flatMap((host) => host.slots);
  const num = (state) => slots.filter((slot) => slot.state === state).length;
  const numbers = {
    Hosts: last.hosts.length,
    "Slots ready": num("ready"),
    "Slots loading": num("loading"),
    "Slots draining": num("draining") + num("leaving"),
    "Slots free": num("free"),
  };
  const cards = Object.fromEntries(Object.entries(numbers).map(([label, number]) => [label, count(number)]));
  return html`<${Cards} cards=${cards} />
    <h2>Relays</h2><${Relays} last=${last} />
    <h2>Live pairs</h2><${Table} label="Live pairs" columns=${PAIR_COLUMNS} rows=${pairsOf(last.instances)}>
      No loading worker computes prompts now. A worker does so when requests wait for its model; a loaded worker then takes
      them over.<//>
    <h2>Hosts</h2>
    ${
      last.hosts.length === 0 &&
      html`<p class="empty">
      No host reports. Look into the scheduler's log, and whether workers run.</p>`
    }
    <div class="hosts">${last.hosts.map((host) => html`<${Host} key=${host.id} host=${host} />`)}</div>`;
}
