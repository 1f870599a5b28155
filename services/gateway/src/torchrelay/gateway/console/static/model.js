import { html, useState } from "/console/vendor/preact-htm.js";
import { call } from "/console/api.js";
import { bytes, count, modelRoute, seconds, time } from "/console/format.js";
import {
  Alert,
  Answered,
  Confirm,
  Decisions,
  Facts,
  ModelLink,
  PhaseBars,
  Select,
  Sender,
  Table,
  useAnswer,
} from "/console/parts.js";
import { Sizing } from "/console/sizing.js";

const VERSION_DIGITS = 16;
export const instancesOf = (last, id) => (last?.instances ?? []).filter((each) => each.models.includes(id));

const ENGINES = ["auto", "torchrelay", "vllm"]; // a model may have another: vllm:2
const TENANTS_SETTINGS = {
  idle_timeout_s: "Idle timeout, s",
  max_instances: "Maximum instances per role",
};
const ADMINS_SETTINGS = {
  min_instances: "Minimum instances per role",
  max_concurrency: "Requests at once per instance",
  threads: "Threads per instance, on a CPU",
  kv_share: "Share of an instance's KV",
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
    const given = {
      engine: form.get("engine"),
      ...Object.fromEntries(Object.keys(fields).map((name) => [name, Number(form.get(name))])),
    };
    if (isAdmin)
      for (const name of ["schedule", "hosts"])
        given[name] = form
          .get(name)
          .split("\n")
          .map((line) => line.trim())
          .filter(Boolean);
    const body = Object.fromEntries(
      Object.entries(given).filter(([name, value]) => String(value) !== String(model[name])),
    );
    setNote("");
    try {
      await call(modelRoute(model.id), { method: "PATCH", body });
      setError("");
      setNote("Saved.");
      onChange();
    } catch (failure) {
      setError(failure.message);
    }
  };
  const idleS = model.effective_idle_timeout_s;
  const idle = idleS ? seconds(idleS) : "as long as the next load would cost";
  return html`<form onSubmit=${submit}><div class="row">
      ${Object.entries(fields).map(([name, label]) => html`<label>${label} <input name=${name} type="number" min="0" step="any" required defaultValue=${model[name]} /></label>`)}
      <${Select} label="Engine" name="engine" options=${[...new Set([...ENGINES, model.engine])]} value=${model.engine} /></div>
    ${
      isAdmin &&
      html`<label>Scheduled minimum instances, one entry per line
      <textarea name="schedule" rows="2" placeholder="mon-fri 08:00-18:00 Europe/Berlin = 2" defaultValue=${model.schedule.join("\n")}></textarea></label>
      <label>Labels that the hosts of its instances have, one per line
      <textarea name="hosts" rows="2" placeholder="zone=a" defaultValue=${model.hosts.join("\n")}></textarea></label>`
    }
    <div class="row"><button>Save</button> <span role="status">${note}</span></div>
    <span class="dim">0 is the platform's default, or no limit. In force: idle for ${idle}, at most
      ${" "}${count(model.effective_max_instances)} instances per role.</span>
    ${error && html`<${Alert}>${error}<//>`}</form>`;
}

function ColdStart({ instance: { id, phases } }) {
  const wholeS = (Math.max(...phases.map(([, , to]) => to)) - Math.min(...phases.map(([, from]) => from))) / 1e6;
  return html`<h3>Last cold start of ${id}: ${seconds(wholeS)}</h3><${PhaseBars} phases=${phases} />`;
}

const PER_MILLION = 1000; // nano-dollars per token of a dollar per million tokens
const KINDS = { prompt: "Prompt", cached: "Cached prompt", output: "Output" };
const perMillion = (nano) => `$${(nano / PER_MILLION).toFixed(3)}`;

// What tokens cost: the rows of the model itself, or else the default. A row is never changed: the next one ends it.
function Price({ id, isAdmin }) {
  const { data, error, again } = useAnswer("/v1/prices");
  const send = async (form) => {
    const of = (kind) => Math.round(Number(form.get(kind)) * PER_MILLION);
    const begin = form.get("valid_from");
    await call("/v1/prices", {
      method: "PUT",
      body: {
        model: id,
        prompt_nano: of("prompt"),
        cached_nano: of("cached"),
        output_nano: of("output"),
        ...(begin && { valid_from: begin }),
      },
    });
    again();
  };
  const now = new Date();
  const listed = (data?.data ?? []).filter(
    ({ model, valid_to }) => (model === id || model === null) && (valid_to === null || new Date(valid_to) > now),
  );
  const own = listed.filter(({ model }) => model === id);
  const hasOwnNow = own.some(({ valid_from }) => new Date(valid_from) <= now);
  const columns = [
    ["Price", ({ model }) => (model === null ? "default" : "of this model")],
    ...Object.entries(KINDS).map(([kind, label]) => [
      `${label}, per million`,
      (each) => perMillion(each[`${kind}_nano`]),
      "number",
    ]),
    ["From, UTC", ({ valid_from }) => (new Date(valid_from) > now ? time(Date.parse(valid_from) / 1000) : "in force")],
  ];
  return html`${error && html`<${Alert}>${error}<//>`}
    <div><${Table} label="Price" columns=${columns} rows=${hasOwnNow ? own : listed}>Loading.<//></div>
    ${
      isAdmin &&
      html`<h3>New price</h3><${Sender} label="Set price" note="Saved." send=${send}>
      ${Object.entries(KINDS).map(([kind, label]) => html`<label>${label}, $ per million <input name=${kind} type="number" min="0" step="0.001" required /></label>`)}
      <label>From, UTC <input name="valid_from" type="date" title="Empty: from now on" /></label><//>`
    }`;
}

// The current version, and the replaced ones to which the model can be rolled back.
function Versions({ id, onChange }) {
  const { data, error, again } = useAnswer(`/v1/versions?model=${encodeURIComponent(id)}`);
  const [failure, setFailure] = useState("");
  const rollBack = (version) =>
    call(`${modelRoute(id)}/rollback`, { method: "POST", body: { version } }).then(
      () => {
        setFailure("");
        onChange();
      },
      (problem) => {
        setFailure(problem.message);
        again();
      },
    );
  const columns = [
    ["Version", (each) => each.id.slice(0, VERSION_DIGITS)],
    ["State", ({ replaced }) => (replaced === null ? "current" : `replaced ${time(replaced)}`)],
    ["Kept until, UTC", ({ kept_until }) => (kept_until === null ? "" : time(kept_until))],
    ["Data type", ({ dtype }) => dtype],
    ["Size", (each) => bytes(each.size_bytes), "number"],
    [
      "",
      (each) =>
        each.replaced !== null &&
        html`<${Confirm} label="Roll back" question="Make it current again?" onYes=${() => rollBack(each.id)} />`,
    ],
  ];
  return html`${(failure || error) && html`<${Alert}>${failure || error}<//>`}
    ${data && html`<${Table} label="Versions" columns=${columns} rows=${data.data} />`}`;
}

function Aliases({ model, onChange }) {
  const send = async (form) => {
    await call(`${modelRoute(model.id)}/aliases`, {
      method: "PUT",
      body: {
        aliases: form
          .get("aliases")
          .split(/[\s,]+/)
          .filter(Boolean),
      },
    });
    onChange();
  };
  return html`<${Sender} label="Set aliases" note="Saved." send=${send}>
    <label>Further names by which requests may call it <input name="aliases" placeholder="none" defaultValue=${model.aliases.join(", ")} /></label><//>`;
}

// What the scheduler decided about a model, the newest first, and what a slot is worth to it.
function Explained({ id }) {
  const answer = useAnswer(`/v1/explain?model=${encodeURIComponent(id)}`, 5000);
  return html`<${Answered} answer=${answer}>${({ worth = [], decisions }) =>
    html`
    ${worth.length > 0 && html`<${Facts} facts=${Object.fromEntries(worth.map(({ label, text }) => [label, text]))} />`}
    <${Decisions} decisions=${decisions}>The scheduler has decided nothing about it since it began.<//>`}<//>`;
}

export function Model({ id, last, isAdmin }) {
  const { data: model, error, again } = useAnswer(modelRoute(id), 10_000);
  const [failure, setFailure] = useState("");
  if (!model) return html`<p><a href="#/models">All models</a></p>${error && html`<${Alert}>${error}<//>`}`;
  const instances = instancesOf(last, id);
  const columns = [
    ["Instance", (each) => each.id],
    ...(isAdmin ? [["Worker", (each) => each.worker]] : []),
    [
      "State",
      (each) =>
        each.state === "loading" ? `loading, ${each.num_layers_ready} of ${each.num_layers || "?"} layers` : each.state,
    ],
    ["For", (each) => seconds(each.in_state_s), "number"],
    ["Roles", (each) => each.roles.join(", ")],
    ...(isAdmin ? [["Running", (each) => each.num_running, "number"]] : []),
  ];
  const facts = {
    Architecture: model.architecture,
    "Data type": model.dtype,
    Size: bytes(model.size_bytes),
    Context: `${count(model.context_length)} tokens`,
    Version: model.version.slice(0, VERSION_DIGITS),
    "Published, UTC": time(model.created),
    ...(model.parent && { "Adapter of": html`<${ModelLink} id=${model.parent} />` }),
  };
  const remove = () =>
    call(modelRoute(id), { method: "DELETE" }).then(
      () => {
        location.hash = "#/models";
      },
      (problem) => setFailure(problem.message),
    );
  return html`<p><a href="#/models">All models</a></p><h2>${id}</h2>
    <${Facts} facts=${facts} />
    <h2>Instances</h2><${Table} label="Instances" columns=${columns} rows=${instances}>The model is at zero: its next request loads it.<//>
    ${instances.filter(({ phases }) => phases.length).map((each) => html`<${ColdStart} key=${each.id} instance=${each} />`)}
    <h2>Size and speed</h2><${Sizing} key=${model.version} id=${id} />
    <h2>Versions</h2><${Versions} key=${model.version} id=${id} onChange=${again} />
    <h2>Settings</h2><${Settings} model=${model} isAdmin=${isAdmin} onChange=${again} />
    <h2>Aliases</h2><${Aliases} model=${model} onChange=${again} />
    <h2>Price</h2><${Price} id=${id} isAdmin=${isAdmin} />
    <h2>Decisions</h2><${Explained} id=${id} />
    <h2>Deletion</h2><${Confirm} label="Delete the model" question=${`Delete ${id} permanently?`} onYes=${remove} />
    ${(failure || error) && html`<${Alert}>${failure || error}<//>`}`;
}
