import { html } from "/console/vendor/preact-htm.js";
import { bytes, count, percent, rate, seconds } from "/console/format.js";
import { Table } from "/console/parts.js";

const link = (model) => html`<a href=${`#/models/${model.split("/").map(encodeURIComponent).join("/")}`}>${model}</a>`;
export const links = (models) => models.map((model, place) => html`${place ? ", " : ""}${model.includes("/") ? link(model) : model}`);

const SLOT_COLUMNS = [
  ["Worker", (slot) => slot.worker],
  ["Slot", (slot) => html`<span class=${`state ${slot.state}`}>${slot.state}${slot.state === "loading" ? `, ${percent(slot.loaded)}` : ""}</span>`],
  ["Model", (slot) => links(slot.models)],
  ["Roles", (slot) => slot.roles.join(", ")],
  ["Running", (slot) => slot.num_running, "number"],
  ["KV used", (slot) => percent(slot.kv_used), "number"],
  ["Device", (slot) => slot.device],
];
const COPY_COLUMNS = [
  ["Model", (copy) => links(copy.models)],
  ["Verified", (copy) => percent(copy.verified), "number"],
  ["Size", (copy) => bytes(copy.pack_bytes), "number"],
  ["Used by", (copy) => copy.num_pins, "number"],
];

function Host({ host }) {
  return html`<section class="plot"><h3>${host.id}</h3>
    <p class="dim">${host.arena_bytes === undefined ? "Its param-store does not report." : `Memory: ${bytes(host.arena_bytes - host.arena_free_bytes)} of ${bytes(host.arena_bytes)} used${host.failure_domain ? `, domain ${host.failure_domain}` : ""}`}</p>
    <${Table} label=${`Slots of ${host.id}`} columns=${SLOT_COLUMNS} rows=${host.slots}>No worker: start one with torchrelay join.<//>
    <h3>Copies in memory</h3>
    <${Table} label=${`Copies of ${host.id}`} columns=${COPY_COLUMNS} rows=${host.memory ?? []}>None.<//>
    ${host.disk?.length > 0 && html`<h3>Copies on disk</h3><p>${links(host.disk)}</p>`}</section>`;
}

const RELAY_COLUMNS = [
  ["Model", (relay) => links(relay.models)],
  ["From", (relay) => relay.sources.join(", ") || "the platform"],
  ["", (relay) => html`<svg class=${`arrow ${relay.state}`} role="img" aria-label=${relay.state} viewBox="0 0 60 12"><path d="M0 6H52M46 1l7 5-7 5" /></svg>`],
  ["To", (relay) => relay.target || "a host"],
  ["State", (relay) => relay.state],
  ["Verified", (relay) => percent(relay.verified), "number"],
  ["Size", (relay) => bytes(relay.pack_bytes), "number"],
  ["MB/s", (relay) => rate(relay.bytes_per_s / 1e6), "number"],
  ["Left", (relay) => (relay.left_s ? seconds(relay.left_s) : ""), "number"],
  ["Reason", (relay) => relay.reason],
];

export const Relays = ({ last }) => html`<${Table} label="Relays" columns=${RELAY_COLUMNS} rows=${last.relays}>
  ${last.num_models ? "No weights are on their way. Call a model at zero to see a relay." : "There is no model yet: publish a folder with torchrelay upload DIR."}<//>`;

export function Cluster({ samples, isAdmin }) {
  const last = samples.at(-1);
  if (!last) return html`<p class="dim">Waiting for the first figures.</p>`;
  if (!isAdmin) return html`<p>Hosts are the operator's: sign in with the admin key to see them. <a href="#/models">Models</a> shows your instances.</p>
    <h2>Relays</h2><${Relays} last=${last} />`;
  const slots = last.hosts.flatMap((host) => host.slots);
  const num = (state) => slots.filter((slot) => slot.state === state).length;
  const cards = { Hosts: last.hosts.length, "Slots ready": num("ready"), "Slots loading": num("loading"), "Slots draining": num("draining") + num("leaving"), "Slots free": num("free") };
  return html`<div class="cards">${Object.entries(cards).map(([label, value]) => html`<div class="card"><span>${label}</span><strong>${count(value)}</strong></div>`)}</div>
    <h2>Relays</h2><${Relays} last=${last} />
    <h2>Hosts</h2>${last.hosts.length === 0 && html`<p class="dim">No host reports. Look into the scheduler's log, and whether workers run.</p>`}
    <div class="hosts">${last.hosts.map((host) => html`<${Host} key=${host.id} host=${host} />`)}</div>`;
}
