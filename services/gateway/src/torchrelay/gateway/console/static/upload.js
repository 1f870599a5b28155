import { html, useEffect, useLayoutEffect, useState } from "/console/vendor/preact-htm.js";
import { call } from "/console/api.js";
import { bytes, count, percent, seconds, time } from "/console/format.js";
import { folderOfDropped, folderOfPicked, modelFiles } from "/console/model_folder.js";
import { ModelUpload } from "/console/model_upload.js";
import { Alert, Confirm, ModelLink, Select, Table, useAnswer } from "/console/parts.js";
import { UploadSizing } from "/console/sizing.js";

const NAME = "[a-z0-9][a-z0-9._\\-]{0,63}"; // the gateway's rule
const STAGES = {
  digest: "Reading",
  send: "Sending",
  wait: "Waiting for others",
  validate: "Checking",
  pack: "Packing",
  publish: "Publishing",
  published: "Published",
};
const WEIGHTS = [
  ["", "As they are"],
  ["int8", "In 8 bits: about half the memory and time to load"],
];
const MAX_SHOWN = 10; // of the names of files that are left out

// The upload of this tab, which goes on while other pages are shown.
let current = null;
let showCurrent = () => {};
const isHeld = () => current?.isRunning;
addEventListener("beforeunload", (event) => isHeld() && event.preventDefault());
export const stopUpload = () => {
  current?.stop();
  current = null;
};

const nameOf = (folder) =>
  folder.name
    .toLowerCase()
    .replace(/[^a-z0-9._-]+/g, "-")
    .replace(/^[._-]+/, "")
    .slice(0, 64);

export function Upload({ models, isAdmin, onPublished }) {
  const [, setTurn] = useState(0);
  const [error, setError] = useState("");
  const [isOver, setIsOver] = useState(false);
  const open = useAnswer("/v1/uploads", 10_000);
  const published = current?.published;
  useEffect(() => {
    showCurrent = () => setTurn((before) => before + 1);
    return () => {
      showCurrent = () => {};
    };
  }, []);
  useEffect(() => {
    open.again();
    onPublished();
  }, [published, current?.isRunning]);

  const take = async (taken) => {
    try {
      if (isHeld()) throw new Error("A folder is being uploaded: wait until it is published, or stop it.");
      stopUpload();
      setError("");
      const folder = await modelFiles(await taken);
      // The base of an adapter must be named, and what an admin finds may be another's.
      current = new ModelUpload(folder, folder.isAdapter || isAdmin, () => showCurrent());
      showCurrent();
    } catch (failure) {
      setError(failure.message);
    }
  };
  useLayoutEffect(() => {
    // the whole page takes a folder: one dropped beside a smaller area would be opened by the browser
    const listeners = {
      dragover: (event) => {
        event.preventDefault();
        setIsOver(true);
      },
      dragleave: ({ relatedTarget }) => {
        if (!relatedTarget) setIsOver(false);
      },
      drop: (event) => {
        event.preventDefault();
        setIsOver(false);
        take(folderOfDropped(event.dataTransfer));
      },
    };
    for (const [type, listener] of Object.entries(listeners)) addEventListener(type, listener);
    return () => {
      for (const [type, listener] of Object.entries(listeners)) removeEventListener(type, listener);
    };
  }, [isAdmin]);
  const pick = ({ target }) => {
    if (target.files.length) take(folderOfPicked(target.files));
    else setError("That folder has no files.");
    target.value = "";
  };
  return html`<section aria-label="Upload"><div class=${`drop ${isOver ? "over" : ""}`}>
      ${
        !isHeld() &&
        html`<label>Upload a model: drop its folder on this page, or choose it
        <input type="file" webkitdirectory multiple onChange=${pick} /></label>`
      }
      ${error && html`<${Alert}>${error}<//>`}
      ${
        current &&
        (current.stage === "name"
          ? html`<${Chosen} key=${current} upload=${current} models=${models} isAdmin=${isAdmin} />`
          : html`<${Progress} upload=${current} onAbort=${open.again} />`)
      }</div>
    <${Open} open=${open} /></section>`;
}

// The form of a folder that was chosen: what of it is sent, and under which name.
function Chosen({ upload, models, isAdmin }) {
  const { folder, begun } = upload;
  const { chosen, leftOut, isAdapter, numBytes } = folder;
  const [isInt8, setIsInt8] = useState(false);
  const [name, setName] = useState(begun || (isAdmin ? "" : nameOf(folder)));
  const submit = (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    upload.publish(name, fields.get("base") ?? "", fields.get("quantize") ?? "");
  };
  const isKnown = models.some(({ id }) => id === name || (!isAdmin && id.endsWith(`/${name}`)));
  const bases = models.filter(({ parent }) => !parent);
  const [shown, numMore] = [leftOut.slice(0, MAX_SHOWN).join(", "), leftOut.length - MAX_SHOWN];
  return html`<form onSubmit=${submit}><div class="row"><label>${isAdmin ? "Name, TENANT/MODEL" : "Name"}
      <input required value=${name} onInput=${(event) => setName(event.target.value)}
        pattern=${isAdmin ? `${NAME}/${NAME}` : `(${NAME}/)?${NAME}`} title="Letters a-z, digits, '.', '_' and '-'" /></label>
      ${
        isAdapter
          ? html`<${Select} label="The model that this adapter changes" name="base" required options=${bases.map(({ id }) => id)} />`
          : html`<${Select} label="Weights of linear layers" name="quantize" options=${WEIGHTS} onInput=${({ target }) => setIsInt8(target.value === "int8")} />`
      }
      <button>Upload</button></div>
    <span>${folder.name}: ${count(chosen.length)} files, ${bytes(numBytes)}: ${chosen.map(([path]) => path).join(", ")}</span>
    <${UploadSizing} chosen=${chosen} isInt8=${isInt8} />
    ${leftOut.length > 0 && html`<span class="dim">Not part of a model, and not sent: ${shown}${numMore > 0 && ` and ${count(numMore)} more`}</span>`}
    ${isKnown && html`<span>${name} exists: this publishes a new version of it.</span>`}</form>`;
}

function Progress({ upload, onAbort }) {
  const { model, folder, stage, files, published, error, field, trouble, bytesPerS } = upload;
  if (published) {
    return html`<p role="status"><${ModelLink} id=${published.id} /> is published.</p>
      ${published.notes?.map((note) => html`<p class="dim">${note}</p>`)}`;
  }
  if (stage === "look" && upload.isRunning) {
    return html`<span role="status">Looking for an unfinished upload of ${folder.name}</span>`;
  }
  const [done, total] = upload.done;
  const isBefore = stage === "digest" || stage === "send";
  const left =
    upload.isRunning && stage === "send" && bytesPerS > 0
      ? `, ${bytes(Math.round(bytesPerS))}/s, ${seconds((total - done) / bytesPerS)} left`
      : "";
  const abort = async () => {
    if (!(await upload.abort())) return;
    stopUpload();
    onAbort();
  };
  const of = (file) => (stage === "digest" ? file.digested : file.sent);
  const state = upload.isRunning ? (STAGES[stage] ?? stage) : "Stopped:";
  return html`<span role="status">${state} ${model || folder.name}</span>
    <label>In total: ${bytes(done)} of ${bytes(total)}${left}
      <progress value=${done} max=${total || 1} /></label>
    ${
      isBefore &&
      html`<${Table} label="Files" rows=${files} columns=${[
        ["File", ({ path }) => path],
        [
          stage === "digest" ? "Read" : "Sent",
          (file) =>
            html`<progress aria-label=${file.path} value=${of(file)} max=${file.size || 1} /> <span>${percent(file.size ? of(file) / file.size : 1)}</span>`,
          "number",
        ],
        ["Size", ({ size }) => bytes(size), "number"],
      ]} />`
    }
    ${trouble && html`<${Alert}>${trouble} Trying again.<//>`}
    ${error && html`<${Alert}>${field && !error.includes(field) ? `${field}: ` : ""}${error}<//>`}
    <div class="row">${
      upload.isRunning
        ? html`<button type="button" onClick=${() => upload.stop()}>Stop</button>`
        : !upload.isRefused && html`<button type="button" onClick=${() => upload.proceed()}>Continue</button>`
    }
      ${!upload.isRunning && upload.id && !upload.isRefused && html`<${Confirm} label="Abort" question="Free what was sent?" onYes=${abort} />`}</div>`;
}

function Open({ open }) {
  const [error, setError] = useState("");
  const abort = (id) =>
    call(`/v1/uploads/${id}`, { method: "DELETE" })
      .then(
        () => setError(""),
        (failure) => setError(failure.message),
      )
      .then(open.again);
  const rows = (open.data?.data ?? []).filter(({ id }) => id !== current?.id);
  const columns = [
    ["Model", ({ model }) => model],
    ["Size", (each) => bytes(each.size_bytes), "number"],
    ["Begun, UTC", ({ created }) => time(created)],
    ["Freed, UTC", ({ expires }) => time(expires)],
    ["", ({ id }) => html`<${Confirm} label="Abort" question="Free what was sent?" onYes=${() => abort(id)} />`],
  ];
  return html`${(error || open.error) && html`<${Alert}>${error || open.error}<//>`}
    ${
      rows.length > 0 &&
      html`<h2>Unfinished uploads</h2><p>Drop the folder again to continue: only what is missing is sent.</p>
      <${Table} label="Unfinished uploads" columns=${columns} rows=${rows} />`
    }`;
}
