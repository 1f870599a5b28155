// Requests as the ledger has them, and the timeline of each as the scheduler remembers it.
import { html, useMemo, useState } from "/console/vendor/preact-htm.js";
import { count, phaseName, requestPage, seconds, time } from "/console/format.js";
import {
  Alert,
  Answered,
  Decisions,
  Facts,
  Loading,
  ModelLink,
  PhaseBars,
  Select,
  Table,
  useAnswer,
} from "/console/parts.js";

const STATUSES = ["running", "ok", "cancelled", "error", "gateway_lost"];
const MEANINGS = {
  running: "It has not ended.",
  ok: "It ended by itself or at its maximum length.",
  cancelled: "Its client left or cancelled it.",
  error: "It failed, or the platform refused it after it was opened.",
  gateway_lost: "Its gateway ended. It is billed for what its gateway had delivered as far as the platform knows.",
};
const PERIODS = { "10 minutes": 1 / 6, hour: 1, day: 24, week: 168 };
const PAGE = 50;
const shown = (status) => status.replace("_", " ");
const endOf = ({ id, status }) => ({ after_id: id, after_status: status });
const Status = ({ of }) => html`<span class=${`status ${of}`}>${shown(of)}</span>`;
const tookS = (request) =>
  request.ended_unix_us === null ? null : (request.ended_unix_us - request.opened_unix_us) / 1e6;

const COLUMNS = [
  ["Request", ({ id }) => html`<a href=${requestPage(id)}>${id}</a>`],
  ["Status", ({ status }) => html`<${Status} of=${status} />`],
  ["Model", ({ model }) => model],
  ["Began, UTC", (each) => time(each.opened_unix_us / 1e6), "time"],
  ["Took", (each) => (tookS(each) === null ? "" : seconds(tookS(each))), "number"],
  ["Prompt", (each) => count(each.prompt_tokens), "number"],
  ["Output", (each) => count(each.completion_tokens), "number"],
  ["Cost", (each) => `$${each.cost}`, "number"],
];

// `filter`: the query without the page. The first page comes again every few seconds, an older one stays as it is.
function Page({ filter, isFiltered }) {
  const [ends, setEnds] = useState([]); // the last requests of the pages before this one, as listed
  const answer = useAnswer(
    `/v1/requests?${filter}&limit=${PAGE}${ends.length ? `&${new URLSearchParams(ends.at(-1))}` : ""}`,
    ends.length ? 0 : 5000,
  );
  const { data } = answer;
  return html`<${Answered} answer=${answer}>${() =>
    html`<${Table} label="Requests" columns=${COLUMNS} rows=${data.data}>
      ${
        isFiltered
          ? "No such request: choose another model, status or period."
          : html`No request yet. Send one from the <a href="#/playground">playground</a>.`
      }<//>`}<//>
    ${
      (ends.length > 0 || data?.has_more) &&
      html`<p class="row">
      <button type="button" disabled=${ends.length === 0} onClick=${() => setEnds(ends.slice(0, -1))}>Newer</button>
      <button type="button" disabled=${!data?.has_more} onClick=${() => setEnds([...ends, endOf(data.data.at(-1))])}>Older</button></p>`
    }`;
}

function List({ isAdmin }) {
  const models = useAnswer("/v1/models");
  const [model, setModel] = useState("");
  const [status, setStatus] = useState("");
  const [period, setPeriod] = useState("day");
  const since = useMemo(() => Math.floor(Date.now() / 1000 - PERIODS[period] * 3600), [period]);
  const names = models.data?.data.filter((each) => !each.alias_of).map(({ id }) => id) ?? [];
  const filter = new URLSearchParams({ from: since, ...(model && { model }), ...(status && { status }) }).toString();
  return html`<form class="row" onSubmit=${(event) => event.preventDefault()}>
      <label>Model <input type="search" list="models" placeholder=${isAdmin ? "all, or TENANT/NAME" : "all"} defaultValue="" onChange=${(event) => setModel(event.target.value.trim())} /></label>
      <datalist id="models">${names.map((name) => html`<option value=${name}></option>`)}</datalist>
      <${Select} label="Status" value=${status} onChange=${setStatus} options=${[["", "all"], ...STATUSES.map((name) => [name, shown(name)])]} />
      <${Select} label="Ended in the last" value=${period} onChange=${setPeriod} options=${Object.keys(PERIODS)} /></form>
    <${Page} key=${`${model} ${status} ${period}`} filter=${filter} isFiltered=${model || status || period !== "day"} />
    <p class="dim">The list is the ledger's, so it is the same at every gateway. Requests that run come first. Prompts and answers are not kept, nor
      requests that are refused at once, as for a wrong field or a spent budget.</p>`;
}

// Phases as bars on one scale of time, and as a table.
function Timeline({ phases }) {
  const ended = phases.filter((phase) => phase.end_unix_us >= phase.begin_unix_us);
  const bars = ended.filter(({ name }) => name !== "error");
  const begin = Math.min(...ended.map((phase) => phase.begin_unix_us));
  const lengthS = (phase) => (phase.end_unix_us - phase.begin_unix_us) / 1e6;
  const columns = [
    ["Phase", ({ name }) => phaseName(name)],
    ["Begins after", (phase) => seconds((phase.begin_unix_us - begin) / 1e6), "number"],
    ["Takes", (phase) => seconds(lengthS(phase)), "number"],
    ["Where", ({ where }) => where],
    ["Detail", ({ detail }) => detail],
  ];
  if (!ended.length) return html`<p class="dim">No phase of it has ended.</p>`;
  return html`<${PhaseBars} phases=${bars.map((phase) => [phase.name, phase.begin_unix_us, phase.end_unix_us])} />
    <${Table} label="Phases" columns=${columns} rows=${ended} />`;
}

function Explained({ id, model, status: state }) {
  const path = `/v1/requests/${encodeURIComponent(id)}/explain`;
  const { data, error, status } = useAnswer(path, state === "running" ? 5000 : 0);
  if (error && status === 404)
    return html`<p>No timeline: ${error}.</p>
    ${state === "error" && html`<p>Its error was in the answer, and would be kept with the timeline only.</p>`}
    <p class="dim">The scheduler keeps the timelines of the last 2,048 requests that it placed, of all gateways together, since it
    began. The page of <${ModelLink} id=${model} /> has the last decisions about the model.</p>`;
  const failure = state === "error" && data?.phases.findLast(({ name }) => name === "error");
  return html`<${Answered} answer=${{ data, error }}>${() =>
    html`
    ${failure && html`<p class="error">Error: ${failure.detail}</p>`}
    <h2>Timeline</h2><${Timeline} phases=${data.phases} />
    <h2>Decisions</h2><${Decisions} decisions=${data.decisions}>The scheduler decided nothing about its model meanwhile.<//>`}<//>`;
}

function Request({ id }) {
  const { data: request, error } = useAnswer(`/v1/requests/${encodeURIComponent(id)}`, 5000);
  const back = html`<p><a href="#/requests">All requests</a></p>`;
  if (!request) return html`${back}${error ? html`<${Alert}>${error}<//>` : html`<${Loading} />`}`;
  const facts = {
    Model: html`<${ModelLink} id=${request.model} />`,
    Status: html`<${Status} of=${request.status} />`,
    "Finish reason": request.causes.map(shown).join(", ") || "not ended",
    "Began, UTC": time(request.opened_unix_us / 1e6),
    Took: tookS(request) === null ? "not ended" : seconds(tookS(request)),
    "Prompt tokens": `${count(request.prompt_tokens)}, ${count(request.cached_tokens)} cached`,
    "Output tokens": count(request.completion_tokens),
    Cost: `$${request.cost}`,
    Key: request.key,
  };
  return html`${back}<h2>${id}</h2>
    <p>${MEANINGS[request.status]}</p>
    <${Facts} facts=${facts} />
    <${Explained} key=${request.status} id=${id} model=${request.model} status=${request.status} />`;
}

export function Requests({ isAdmin, path }) {
  const id = path.map(decodeURIComponent).join("/");
  return id ? html`<${Request} key=${id} id=${id} />` : html`<${List} isAdmin=${isAdmin} />`;
}
