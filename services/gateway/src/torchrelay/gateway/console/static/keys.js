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

const number = (form, name, factor = 1) => (form.get(name) ? Math.round(Number(form.get(name)) * factor) : null);

const Limits = ({ budget = "", quota = "", serviceClass = "" }) =>
  html`
  <label>Budget, $ <input name="budget" type="number" min="0" step="any" placeholder="none" defaultValue=${budget} /></label>
  <label>Storage quota, GB <input name="quota" type="number" min="0" step="any" placeholder="none" defaultValue=${quota} /></label>
  <${ClassField} value=${serviceClass} none="standard" />`;

function Tenants({ tenants }) {
  const limits = (form) => ({
    budget_nano: number(form, "budget", NANO),
    storage_quota_bytes: number(form, "quota", GB),
    service_class: form.get("service_class") || null,
  });
  const create = async (form) => {
    await call("/v1/tenants", { method: "POST", body: { name: form.get("name"), ...limits(form) } });
    tenants.again();
  };
  const change = async (form) => {
    await call(`/v1/tenants/${encodeURIComponent(form.get("tenant"))}`, { method: "PATCH", body: limits(form) });
    setChosen("");
    tenants.again();
  };
  const listed = tenants.data?.data ?? [];
  const [chosen, setChosen] = useState("");
  const tenant = listed.find(({ name }) => name === chosen);
  const columns = [
    ["Tenant", (each) => each.name],
    ["Budget", (each) => (each.budget_nano === null ? "none" : `$${each.budget_nano / NANO}`), "number"],
    [
      "Storage quota",
      (each) => (each.storage_quota_bytes === null ? "none" : bytes(each.storage_quota_bytes)),
      "number",
    ],
    ["Class", (each) => each.service_class ?? "standard"],
    ["Created, UTC", (each) => time(each.created)],
  ];
  const of = (figure, unit) => (figure == null ? "" : figure / unit);
  return html`<h2>Tenants</h2>
    <${Table} label="Tenants" columns=${columns} rows=${listed}>There is no tenant yet: create the first one below.<//>
    <h3>New tenant</h3>
    <${Sender} label="Create tenant" send=${create}>
      <label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]*" maxlength="64" /></label>
      <${Limits} /><//>
    ${
      listed.length > 0 &&
      html`<h3>Limits of a tenant</h3>
    <${Sender} label="Change limits" send=${change}>
      <${Select} label="Tenant" name="tenant" required value=${chosen} onChange=${setChosen} options=${[["", "choose"], ...listed.map(({ name }) => name)]} />
      <${Limits} key=${chosen} budget=${of(tenant?.budget_nano, NANO)} quota=${of(tenant?.storage_quota_bytes, GB)} serviceClass=${tenant?.service_class ?? ""} /><//>`
    }`;
}

export function Keys({ isAdmin }) {
  const keys = useAnswer("/v1/keys");
  const tenants = useAnswer(isAdmin ? "/v1/tenants" : "/v1/models?limit=1");
  const [made, setMade] = useState("");
  const [error, setError] = useState("");
  const create = async (form) => {
    const body = {
      name: form.get("name"),
      requests_per_minute: number(form, "requests_per_minute"),
      service_class: form.get("service_class") || null,
    };
    if (isAdmin) body.tenant = form.get("tenant");
    setMade((await json("/v1/keys", { method: "POST", body })).key);
    keys.again();
  };
  const revoke = async (id) => {
    await call(`/v1/keys/${encodeURIComponent(id)}`, { method: "DELETE" }).then(
      () => setError(""),
      (failure) => setError(failure.message),
    );
    keys.again();
  };
  const columns = [
    ["Key", (each) => each.id],
    ["Name", (each) => each.name],
    ...(isAdmin ? [["Tenant", (each) => each.tenant]] : []),
    [
      "Requests/min",
      (each) => (each.requests_per_minute === null ? "no limit" : count(each.requests_per_minute)),
      "number",
    ],
    ["Class", (each) => each.service_class ?? "the tenant's"],
    ["Created, UTC", (each) => time(each.created), "time"],
    [
      "",
      (each) =>
        each.revoked
          ? "revoked"
          : html`<${Confirm} label="Revoke" question="Revoke this key permanently?" onYes=${() => revoke(each.id)} />`,
    ],
  ];
  return html`<${Sender} label="Create key" send=${create}>
      ${isAdmin && html`<${Select} label="Tenant" name="tenant" required options=${(tenants.data?.data ?? []).map(({ name }) => name)} />`}
      <label>Name <input name="name" maxlength="200" placeholder="what it is for" /></label>
      <label>Requests per minute <input name="requests_per_minute" type="number" min="1" placeholder="no limit" /></label>
      <${ClassField} none="the tenant's" /><//>
    ${
      made &&
      html`<p role="status">The new key, which is shown only now: <code id="new-key">${made}</code>
      <button onClick=${() => navigator.clipboard.writeText(made)}>Copy</button></p>`
    }
    ${error && html`<${Alert}>${error}<//>`}
    <${Answered} answer=${keys}>${({ data }) => html`<${Table} label="Keys" columns=${columns} rows=${data}>There is no key yet: create one above.<//>`}<//>
    ${isAdmin && tenants.data && html`<${Tenants} tenants=${tenants} />`}`;
}
