import { html, useState } from "/console/vendor/preact-htm.js";
import { bytes, time } from "/console/format.js";
import { Answered, Select, Table, useAnswer } from "/console/parts.js";

const KINDS = ["relay", "instance", "scale", "copy", "store", "model", "budget"];
const HOURS = { "the last 10 minutes": 1 / 6, "the last hour": 1, "the last day": 24, "the last week": 168 };
const textOf = ({ worker_id, reason, pack_bytes }) =>
  [worker_id, reason || (pack_bytes && bytes(pack_bytes))].filter(Boolean).join(": ");
const COLUMNS = [
  ["Time, UTC", (event) => time(event.at_unix_us / 1e6), "time"],
  ["Kind", (event) => event.kind],
  ["Model", (event) => event.model],
  ["What happened", textOf],
];

export function Events({ isAdmin }) {
  const [kind, setKind] = useState("");
  const [period, setPeriod] = useState("the last hour");
  const since = new Date(Math.floor(Date.now() / 60_000) * 60_000 - HOURS[period] * 3_600_000)
    .toISOString()
    .slice(0, 19);
  if (!isAdmin)
    return html`<p class="empty">
    Events name the models of all tenants: sign in with the admin key to see them.</p>`;
  return html`<form class="row" onSubmit=${(event) => event.preventDefault()}>
      <${Select} label="Kind" value=${kind} onChange=${setKind} options=${[["", "all"], ...KINDS]} />
      <${Select} label="Period" value=${period} onChange=${setPeriod} options=${Object.keys(HOURS)} /></form>
    <${History} path=${`/v1/events?since=${since}&limit=500${kind && `&kind=${kind}`}`} />`;
}

function History({ path }) {
  return html`<${Answered} answer=${useAnswer(path, 5000)}>${({ data }) =>
    html`
    <${Table} label="Events" columns=${COLUMNS} rows=${[...data].reverse()}>Nothing happened: choose a longer period.<//>`}<//>`;
}
