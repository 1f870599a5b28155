import { html, useMemo, useState } from "/console/vendor/preact-htm.js";
import { links, Relays } from "/console/cluster.js";
import { count, dollars, rate, seconds } from "/console/format.js";
import { Alert, Cards, Select, useAnswer } from "/console/parts.js";
import { Plot } from "/console/plot.js";

const PERIODS = { "15 minutes": 900, "1 hour": 3600, "24 hours": 86_400 };
const MINUTE_S = 60;
const HOUR_S = 3600;
const today = () => new Date().toISOString().slice(0, 10);
const ttft = (value) => (value === null ? "none in the last minute" : seconds(value));

// Points of [unix seconds, requests/s, tokens/s] since a time: minutes of the ledger, then the live samples.
function pointsOf(minutes, samples, fromS) {
  const firstS = samples[0].at_unix_s;
  const sums = new Map(minutes.map((each) => [Date.parse(each.minute) / 1000, each]));
  const points = [];
  for (let at = Math.ceil(fromS / MINUTE_S) * MINUTE_S; at + MINUTE_S <= firstS; at += MINUTE_S) {
    const { requests = 0, prompt_tokens = 0, completion_tokens = 0 } = sums.get(at) ?? {};
    points.push([at + MINUTE_S / 2, requests / MINUTE_S, (prompt_tokens + completion_tokens) / MINUTE_S]);
  }
  return [...points, ...samples.map((each) => [each.at_unix_s, each.requests_per_s, each.tokens_per_s])];
}

const columnOf = (points, column) => [points.map(([at]) => at), points.map((point) => point[column])];

// What needs attention, and what to do next; tenants are told what concerns them.
function Alerts({ alerts }) {
  if (!alerts.length) return html`<p class="dim">No alert: nothing needs attention.</p>`;
  return html`<section aria-label="Alerts"><h2>Alerts</h2><ul class="alerts">${alerts.map(
    ({ text, advice, models, is_critical }) =>
      html`<li class=${is_critical ? "critical" : ""}>
    <strong>${is_critical ? "Critical" : "Warning"}${models.length > 0 && html`: ${links(models)}`}</strong> ${text} ${advice && html`<span class="dim">${advice}</span>`}</li>`,
  )}</ul></section>`;
}

export function Overview({ samples }) {
  const spend = useAnswer(`/v1/usage?from=${today()}`, 15_000);
  const [period, setPeriod] = useState("15 minutes");
  const fromS = Math.floor(Date.now() / 1000 / HOUR_S) * HOUR_S - PERIODS[period]; // the same for an hour: it is in the address
  const minutes = useAnswer(`/v1/usage?group_by=minute&from=${fromS}`, 60_000);
  const last = samples.at(-1);
  const points = useMemo(
    () => last && pointsOf(minutes.data?.data ?? [], samples, last.at_unix_s - PERIODS[period]),
    [minutes.data, samples, period],
  );
  if (!last) return html`<p class="dim">Waiting for the first figures.</p>`;
  const range = [last.at_unix_s - PERIODS[period], last.at_unix_s];
  const cards = {
    "Requests/s": rate(last.requests_per_s),
    "Tokens/s": rate(last.tokens_per_s),
    "TTFT P50": ttft(last.ttft_p50_s),
    "TTFT P95": ttft(last.ttft_p95_s),
    "Models awake": count(last.num_awake),
    "Models at zero": count(last.num_models - last.num_awake),
    Running: count(last.num_running),
    Waiting: count(last.num_waiting),
    "Spend today": spend.data ? dollars(spend.data.total.cost) : spend.error,
  };
  return html`
    <${Alerts} alerts=${last.alerts} />
    <${Cards} cards=${cards} />
    <p><${Select} isInline label="Plots of the last" value=${period} onChange=${setPeriod} options=${Object.keys(PERIODS)}> in UTC<//></p>
    <div class="plots">
      <${Plot} title="Requests/s" data=${columnOf(points, 1)} range=${range} />
      <${Plot} title="Tokens/s" data=${columnOf(points, 2)} range=${range} /></div>
    ${minutes.error && html`<${Alert}>${minutes.error}<//>`}
    <h2>Relays</h2><${Relays} last=${last} />`;
}
