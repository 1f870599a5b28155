import { html, useState } from "/console/vendor/preact-htm.js";
import { call, json } from "/console/api.js";
import { bytes, count, time } from "/console/format.js";
import { Alert, Answered, Confirm, Select, Sender, Table, useAnswer } from "/console/parts.js";

const CLASSES = ["interactive", "standard", "batch"];
const NANO = 1e9; // nano-dollars of a dollar
const GB = 1e9;
const ClassField = ({ value = "", none }) =>
  html`
  <${Select} label="Service class" name="service_class" options=${[["", none], ...CLASSES]} value=${value} />`;

const PERIODS = [["", "of all time"], ...["day", "week", "month"].map((each) => [each, `per ${each}`])];
const number = (form, name, factor = 1) => (form.get(name) ? Math.round(Number(form.get(name)) * factor) : null);
const of = (figure, unit = 1) => (figure == null ? "" : figure / unit);

// The fields of limits, which keys and tenants have alike; `has` are those in force.
const LimitFields = ({ has = {} }) =>
  html`
  <label>Requests per minute <input name="requests_per_minute" type="number" min="1" placeholder="no limit" defaultValue=${of(has.requests_per_minute)} /></label>
  <label>Tokens per minute <input name="tokens_per_minute" type="number" min="1" placeholder="no limit" defaultValue=${of(has.tokens_per_minute)} /></label>
  <label>Requests at once <input name="concurrent_requests" type="number" min="1" placeholder="no limit" defaultValue=${of(has.concurrent_requests)} /></label>
  <label>Budget, $ <input name="budget" type="number" min="0" step="any" placeholder="no limit" defaultValue=${of(has.budget_nano, NANO)} /></label>
  <${Select} label="Budget period" name="budget_period" options=${PERIODS} value=${has.budget_period ?? ""} />`;

const limits = (form) => ({
  requests_per_minute: number(form, "requests_per_minute"),
  tokens_per_minute: number(form, "tokens_per_minute"),
  concurrent_requests: number(form, "concurrent_requests"),
  budget_nano: number(form, "budget", NANO),
  budget_period: (form.get("budget") && form.get("budget_period")) || null,
});

function limitsText(has) {
  const texts = [
    [has.requests_per_minute, "requests/min"],
    [has.tokens_per_minute, "tokens/min"],
    [has.concurrent_requests, "at once"],
  ].flatMap(([figure, words]) => (figure === null ? [] : [`${count(figure)} ${words}`]));
  if (has.budget_nano !== null)
    texts.push(`$${has.budget_nano / NANO}${has.budget_period ? `/${has.budget_period}` : ""}`);
  return texts.join(", ") || "no limit";
}

// What a key may do, and until when.
const AccessFields = ({ has = {} }) =>
  html`
  <label>Models <input name="models" placeholder="all" defaultValue=${has.models?.join(", ") ?? ""} /></label>
  <label>Expires, UTC <input name="expires" type="date" defaultValue=${has.expires_at?.slice(0, 10) ?? ""} /></label>`;

const access = (form) => {
  const models = form
    .get("models")
    .split(/[\s,]+/)
    .filter(Boolean);
  return { models: models.length ? models : null, expires_at: form.get("expires") || null };
};

const seconds = (iso) => Date.parse(iso) / 1000;

function state(key) {
  if (key.revoked) return "revoked";
  if (key.paused) return "paused";
  return key.expires_at && seconds(key.expires_at) <= Date.now() / 1000 ? "expired" : "active";
}

function Tenants({ tenants }) {
  const settings = (form) => ({
    ...limits(form),
    storage_quota_bytes: number(form, "quota", GB),
    service_class: form.get("service_class") || null,
  });
  const create = async (form) => {
    await call("/v1/tenants", { method: "POST", body: { name: form.get("name"), ...settings(form) } });
    tenants.again();
  };
  const change = async (form) => {
    await call(`/v1/tenants/${encodeURIComponent(form.get("tenant"))}`, { method: "PATCH", body: settings(form) });
    setChosen("");
    tenants.again();
  };
  const suspend = async (name, suspended) => {
    await call(`/v1/tenants/${encodeURIComponent(name)}`, { method: "PATCH", body: { suspended } });
    tenants.again();
  };
  const listed = tenants.data?.data ?? [];
  const [chosen, setChosen] = useState("");
  const tenant = listed.find(({ name }) => name === chosen);
  const columns = [
    ["Tenant", (each) => each.name],
    ["Limits of all its keys", limitsText],
    [
      "Storage quota",
      (each) => (each.storage_quota_bytes === null ? "none" : bytes(each.storage_quota_bytes)),
      "number",
    ],
    ["Class", (each) => each.service_class ?? "any"],
    ["Created, UTC", (each) => time(each.created)],
    [
      "State",
      (each) =>
        each.deleted
          ? "deleted"
          : html`<span>${each.suspended ? "suspended" : "active"} </span>
        <${Confirm} label=${each.suspended ? "Resume" : "Suspend"} question=${each.suspended ? "Accept its requests again?" : "Refuse all its requests?"}
          onYes=${() => suspend(each.name, !each.suspended)} />`,
    ],
  ];
  const fields = (has) =>
    html`<${LimitFields} has=${has} />
      <label>Storage quota, GB <input name="quota" type="number" min="0" step="any" placeholder="no limit" defaultValue=${of(has?.storage_quota_bytes, GB)} /></label>
      <${ClassField} value=${has?.service_class ?? ""} none="any" />`;
  return html`<h2>Tenants</h2>
    <${Table} label="Tenants" columns=${columns} rows=${listed}>There is no tenant yet: create the first one below.<//>
    <h3>New tenant</h3>
    <${Sender} label="Create tenant" send=${create}>
      <label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]*" maxlength="64" /></label>
      ${fields()}<//>
    ${
      listed.length > 0 &&
      html`<h3>Limits of a tenant</h3>
    <${Sender} label="Change limits" send=${change}>
      <${Select} label="Tenant" name="tenant" required value=${chosen} onChange=${setChosen} options=${[["", "choose"], ...listed.map(({ name }) => name)]} />
<div class="fields" key=${chosen}>${fields(tenant)}</div><//>`
    }`;
}

const ROLES = ["viewer", "operator", "admin"];

function Operators() {
  const operators = useAnswer("/v1/operators");
  const [made, setMade] = useState("");
  const create = async (form) => {
    const body = { name: form.get("name"), role: form.get("role") };
    setMade((await json("/v1/operators", { method: "POST", body })).key);
    operators.again();
  };
  const revoke = async (name) => {
    await call(`/v1/operators/${encodeURIComponent(name)}`, { method: "DELETE" });
    operators.again();
  };
  const columns = [
    ["Operator", (each) => each.name],
    ["Role", (each) => each.role],
    ["Created, UTC", (each) => time(each.created), "time"],
    [
      "",
      (each) =>
        each.revoked
          ? "revoked"
          : html`<${Confirm} label="Revoke" question="Revoke this operator's key?" onYes=${() => revoke(each.name)} />`,
    ],
  ];
  return html`<h2>Operators</h2>
    <${Answered} answer=${operators}>${({ data }) => html`<${Table} label="Operators" columns=${columns} rows=${data}>Operators have keys of their own: create the first below.<//>`}<//>
    <${Sender} label="Create operator" send=${create}>
      <label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]*" maxlength="64" /></label>
      <${Select} label="Role" name="role" options=${ROLES} value="viewer" /><//>
    ${made && html`<p role="status">The operator's key, which is shown only now: <code>${made}</code></p>`}`;
}

export function Keys({ isAdmin }) {
  const keys = useAnswer("/v1/keys");
  const tenants = useAnswer(isAdmin ? "/v1/tenants" : "/v1/models?limit=1");
  const [made, setMade] = useState("");
  const [error, setError] = useState("");
  const create = async (form) => {
    const body = {
      name: form.get("name"),
      ...limits(form),
      ...access(form),
      service_class: form.get("service_class") || null,
    };
    if (isAdmin) body.tenant = form.get("tenant");
    setMade((await json("/v1/keys", { method: "POST", body })).key);
    keys.again();
  };
  const [chosen, setChosen] = useState("");
  const act = async (id, part, request) => {
    await call(`/v1/keys/${encodeURIComponent(id)}${part}`, request).then(
      async (answer) => {
        setError("");
        if (part) setMade((await answer.json()).key);
      },
      (failure) => setError(failure.message),
    );
    keys.again();
  };
  const change = async (form) => {
    const body = { name: form.get("name"), ...limits(form), ...access(form), paused: form.get("state") === "paused" };
    if ((body.expires_at ?? "") === (key.expires_at?.slice(0, 10) ?? "")) delete body.expires_at; // it has a time of day
    await call(`/v1/keys/${encodeURIComponent(form.get("key"))}`, { method: "PATCH", body });
    setChosen("");
    keys.again();
  };
  const columns = [
    ["Key", (each) => each.id],
    ["Name", (each) => each.name],
    ...(isAdmin ? [["Tenant", (each) => each.tenant]] : []),
    ["Limits", limitsText],
    ["Models", (each) => each.models?.join(", ") ?? "all"],
    ["Class", (each) => each.service_class ?? "the tenant's"],
    ["Created, UTC", (each) => time(each.created), "time"],
    ["Last used, UTC", (each) => (each.last_used_at ? time(seconds(each.last_used_at)) : "never"), "time"],
    ["State", state],
    [
      "",
      (each) =>
        each.revoked ||
        html`<${Confirm} label="Rotate" question="Make another secret? The old one stays valid for a day." onYes=${() => act(each.id, "/rotate", { method: "POST", body: {} })} />
        <${Confirm} label="Revoke" question="Revoke this key permanently?" onYes=${() => act(each.id, "", { method: "DELETE" })} />`,
    ],
  ];
  const live = (keys.data?.data ?? []).filter((each) => !each.revoked);
  const key = live.find(({ id }) => id === chosen);
  return html`<${Sender} label="Create key" send=${create}>
      ${isAdmin && html`<${Select} label="Tenant" name="tenant" required options=${(tenants.data?.data ?? []).map(({ name }) => name)} />`}
      <label>Name <input name="name" maxlength="200" placeholder="what it is for" /></label>
      <${LimitFields} /><${AccessFields} />
      <${ClassField} none="the tenant's" /><//>
    ${
      made &&
      html`<p role="status">The new key, which is shown only now: <code id="new-key">${made}</code>
      <button onClick=${() => navigator.clipboard.writeText(made)}>Copy</button></p>`
    }
    ${error && html`<${Alert}>${error}<//>`}
    <${Answered} answer=${keys}>${({ data }) => html`<${Table} label="Keys" columns=${columns} rows=${data}>There is no key yet: create one above.<//>`}<//>
    ${
      live.length > 0 &&
      html`<h3>Settings of a key</h3>
    <${Sender} label="Change key" send=${change}>
      <${Select} label="Key" name="key" required value=${chosen} onChange=${setChosen} options=${[["", "choose"], ...live.map(({ id, name }) => [id, name ? `${name} (${id})` : id])]} />
      <div class="fields" key=${chosen}>
        <label>Name <input name="name" maxlength="200" defaultValue=${key?.name ?? ""} /></label>
        <${LimitFields} has=${key} /><${AccessFields} has=${key} />
        <${Select} label="State" name="state" options=${["active", "paused"]} value=${key?.paused ? "paused" : "active"} /></div><//>`
    }
    ${isAdmin && tenants.data && html`<${Tenants} tenants=${tenants} /><${Operators} />`}`;
}
