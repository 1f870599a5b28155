import { html, useState } from "/console/vendor/preact-htm.js";
import { call } from "/console/api.js";
import { bytes, count, percent, seconds, time } from "/console/format.js";
import { Alert, Confirm, Explained, Loading, Table, useAnswer } from "/console/parts.js";

const addressOf = (id) => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}`;
const pageOf = (id) => `#/models/${id.split("/").map(encodeURIComponent).join("/")}`;
const instancesOf = (last, id) => (last?.instances ?? []).filter((each) => each.models.includes(id));
const lastLoadS = ({ phases }) => (phases.length ? (Math.max(...phases.map(([, , end]) => end)) - Math.min(...phases.map(([, begin]) => begin))) / 1e6 : null);

function stateOf(last, id) {
  const instances = instancesOf(last, id);
  const ready = instances.filter(({ state }) => state === "ready").length;
  if (ready) return `${ready} ready`;
  const loading = instances.find(({ state }) => state === "loading");
  if (loading) return `loading, ${percent(loading.loaded)}`;
  return instances.length ? "draining" : "at zero";
}

function List({ models, last }) {
  const [filter, setFilter] = useState("");
  const shown = models.filter(({ id, aliases }) => [id, ...aliases].some((name) => name.includes(filter.trim())));
  const columns = [
    ["Model", ({ id }) => html`<a href=${pageOf(id)}>${id}</a>`],
    ["Aliases", ({ aliases }) => aliases.join(", ")],
    ["State", ({ id }) => stateOf(last, id)],
    ["Running", ({ id }) => last?.demand[id]?.[0] ?? 0, "number"],
    ["Waiting", ({ id }) => last?.demand[id]?.[1] ?? 0, "number"],
    ["Last load", ({ id }) => instancesOf(last, id).map(lastLoadS).filter(Boolean).map(seconds)[0] ?? "", "number"],
    ["Size", (model) => bytes(model.size_bytes), "number"],
    ["Context", (model) => count(model.context_length), "number"],
  ];
  return html`<form class="row" onSubmit=${(event) => event.preventDefault()}>
      <label>Name contains <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
      <span class="dim" role="status">${count(shown.length)} of ${count(models.length)} models</span></form>
    <${Table} label="Models" columns=${columns} rows=${shown}>
      ${models.length ? "No model has such a name: change the filter." : "There is no model yet: publish a folder with torchrelay upload DIR."}<//>`;
}

const TENANTS_SETTINGS = { idle_timeout_s: "Idle timeout, s", max_instances: "Most instances per role" };
const ADMINS_SETTINGS = {
  min_instances: "Least instances per role",
  interactive_ttft_s: "TTFT target, interactive, s",
  standard_ttft_s: "TTFT target, standard, s",
  batch_ttft_s: "TTFT target, batch, s",
  tbt_target_s: "Target between tokens, s",
};

function Settings({ model, isAdmin, onChange }) {
  const [note, setNote] = useState("");
  const [error, setError] = useState("");
  const fields = isAdmin ? { ...TENANTS_SETTINGS, ...ADMINS_SETTINGS } : TENANTS_SETTINGS;
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const body = Object.fromEntries(Object.keys(fields).map((name) => [name, Number(form.get(name))]).filter(([name, value]) => value !== model[name]));
    setNote("");
    try {
      await call(addressOf(model.id), { method: "PATCH", body });
      setError("");
      setNote("Saved.");
      onChange();
    } catch (failure) { setError(failure.message); }
  };
  return html`<form onSubmit=${submit}><div class="row">
      ${Object.entries(fields).map(([name, label]) => html`<label>${label} <input name=${name} type="number" min="0" step="any" required defaultValue=${model[name]} /></label>`)}
      <button>Save</button> <span role="status">${note}</span></div>
    <span class="dim">0 is the platform's default. In force: idle for ${seconds(model.effective_idle_timeout_s)}, at most ${count(model.effective_max_instances)} instances per role.</span>
    ${error && html`<${Alert}>${error}<//>`}</form>`;
}

// The phases of a load as bars on one scale of time.
function ColdStart({ instance }) {
  const begin = Math.min(...instance.phases.map(([, from]) => from));
  const whole = Math.max(...instance.phases.map(([, , to]) => to)) - begin || 1;
  return html`<h3>Last cold start of ${instance.id}: ${seconds(whole / 1e6)}</h3><ul class="timeline">
    ${instance.phases.map(([name, from, to]) => html`<li><span>${name.replace("_", " ")}</span>
      <svg aria-hidden="true"><rect x=${`${((from - begin) / whole) * 100}%`} width=${`${Math.max(((to - from) / whole) * 100, 0.5)}%`} height="100%" /></svg>
      <span class="number">${seconds((to - from) / 1e6)}</span></li>`)}</ul>`;
}

function Model({ id, last, isAdmin }) {
  const { data: model, error, again } = useAnswer(addressOf(id));
  const [failure, setFailure] = useState("");
  if (!model) return html`<p><a href="#/models">All models</a></p>${error && html`<${Alert}>${error}<//>`}`;
  const instances = instancesOf(last, id);
  const columns = [
    ["Instance", (each) => each.id],
    ...(isAdmin ? [["Worker", (each) => each.worker]] : []),
    ["State", (each) => (each.state === "loading" ? `loading, ${each.num_layers_ready} of ${each.num_layers || "?"} layers` : each.state)],
    ["For", (each) => seconds(each.in_state_s), "number"],
    ["Roles", (each) => each.roles.join(", ")],
    ...(isAdmin ? [["Running", (each) => each.num_running, "number"]] : []),
  ];
  const facts = { Architecture: model.architecture, "Data type": model.dtype, Size: bytes(model.size_bytes), Context: `${count(model.context_length)} tokens`, Version: model.version.slice(0, 16), "Published, UTC": time(model.created) };
  const remove = () => call(addressOf(id), { method: "DELETE" }).then(() => { location.hash = "#/models"; }, (problem) => setFailure(problem.message));
  return html`<p><a href="#/models">All models</a></p><h2>${id}</h2>
    <dl>${Object.entries(facts).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <h2>Instances</h2><${Table} label="Instances" columns=${columns} rows=${instances}>The model is at zero: its next request loads it.<//>
    ${instances.filter(({ phases }) => phases.length).map((each) => html`<${ColdStart} key=${each.id} instance=${each} />`)}
    <h2>Settings</h2><${Settings} model=${model} isAdmin=${isAdmin} onChange=${again} />
    <h2>Decisions</h2><${Explained} path=${`/v1/explain?model=${encodeURIComponent(id)}`} />
    <h2>Deletion</h2><${Confirm} label="Delete the model" question=${`Delete ${id} for ever?`} onYes=${remove} />
    ${(failure || error) && html`<${Alert}>${failure || error}<//>`}`;
}

export function Models({ samples, isAdmin, path }) {
  const { data, error } = useAnswer("/v1/models", 10_000);
  const last = samples.at(-1);
  const id = path.map(decodeURIComponent).join("/");
  if (id) return html`<${Model} key=${id} id=${id} last=${last} isAdmin=${isAdmin} />`;
  return html`${error && html`<${Alert}>${error}<//>`}
    ${data ? html`<${List} models=${data.data.filter((each) => !each.alias_of)} last=${last} />` : !error && html`<${Loading} />`}`;
}
