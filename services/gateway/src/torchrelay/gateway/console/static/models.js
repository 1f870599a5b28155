import { html, useState } from "/console/vendor/preact-htm.js";
import { bytes, count, percent, seconds } from "/console/format.js";
import { Model, instancesOf } from "/console/model.js";
import { Answered, ModelLink, Table, useAnswer } from "/console/parts.js";
import { Upload } from "/console/upload.js";

const lastLoadS = ({ phases }) =>
  phases.length
    ? (Math.max(...phases.map(([, , end]) => end)) - Math.min(...phases.map(([, begin]) => begin))) / 1e6
    : null;

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
    ["Model", ({ id }) => html`<${ModelLink} id=${id} />`],
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
      ${
        models.length
          ? "No model has such a name: change the filter."
          : html`There is no model yet: upload one above, or with <code>torchrelay upload DIR</code>.`
      }<//>`;
}

export function Models({ samples, isAdmin, path }) {
  const answer = useAnswer("/v1/models", 10_000);
  const last = samples.at(-1);
  const id = path.map(decodeURIComponent).join("/");
  if (id) return html`<${Model} key=${id} id=${id} last=${last} isAdmin=${isAdmin} />`;
  const models = (answer.data?.data ?? []).filter((each) => !each.alias_of);
  return html`<${Upload} models=${models} isAdmin=${isAdmin} onPublished=${answer.again} />
    <${Answered} answer=${answer}>${() => html`<${List} models=${models} last=${last} />`}<//>`;
}
