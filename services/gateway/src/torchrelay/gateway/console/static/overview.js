import { html, useEffect, useRef } from "/console/vendor/preact-htm.js";
import uPlot from "/console/vendor/uplot.js";
import { Relays } from "/console/cluster.js";
import { count, dollars, rate, seconds } from "/console/format.js";
import { Alert, useAnswer } from "/console/parts.js";

const SHOWN_S = 900;
const today = () => new Date().toISOString().slice(0, 10);
const ttft = (value) => (value === null ? "none yet" : seconds(value));

function Plot({ title, samples, of }) {
  const place = useRef(null);
  const plot = useRef(null);
  const latest = useRef(0);
  latest.current = samples.at(-1).at_unix_s;
  useEffect(() => {
    const style = getComputedStyle(document.body);
    const line = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.color, grid: line, ticks: line };
    const size = () => ({ width: place.current.clientWidth, height: 160 });
    const scales = { x: { range: () => [latest.current - SHOWN_S, latest.current] }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } };
    const series = [{}, { stroke: style.getPropertyValue("--accent"), width: 2 }];
    const options = { ...size(), scales, series, axes: [axis, axis], legend: { show: false } };
    plot.current = new uPlot(options, [[], []], place.current);
    const watcher = new ResizeObserver(() => plot.current.setSize(size()));
    watcher.observe(place.current);
    return () => { watcher.disconnect(); plot.current.destroy(); };
  }, []);
  useEffect(() => plot.current.setData([samples.map((each) => each.at_unix_s), samples.map(of)]), [samples]);
  return html`<section class="plot"><h2>${title}</h2><div ref=${place}></div></section>`;
}

export function Overview({ samples }) {
  const spend = useAnswer(`/v1/usage?from=${today()}`, 15_000);
  const last = samples.at(-1);
  if (!last) return html`<p class="dim">Waiting for the first figures.</p>`;
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
    ${last.is_scheduler_away && html`<${Alert}>The scheduler does not answer, so models count as at zero: look into its log.<//>`}
    <div class="cards">${Object.entries(cards).map(([label, value]) => html`<div class="card"><span>${label}</span><strong>${value}</strong></div>`)}</div>
    <div class="plots">
      <${Plot} title="Requests/s" samples=${samples} of=${(each) => each.requests_per_s} />
      <${Plot} title="Tokens/s" samples=${samples} of=${(each) => each.tokens_per_s} /></div>
    <h2>Relays</h2>
    <${Relays} last=${last} />`;
}
