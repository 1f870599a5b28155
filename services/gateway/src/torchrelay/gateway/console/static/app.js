import { html, render, useEffect, useState } from "/console/vendor/preact-htm.js";
import { call, events, key } from "/console/api.js";
import { Audit } from "/console/audit.js";
import { Cluster } from "/console/cluster.js";
import { Events } from "/console/events.js";
import { Keys } from "/console/keys.js";
import { Models } from "/console/models.js";
import { Overview } from "/console/overview.js";
import { Alert } from "/console/parts.js";
import { Playground } from "/console/playground.js";
import { Requests } from "/console/requests.js";
import { stopUpload } from "/console/upload.js";
import { Usage } from "/console/usage.js";

const PAGES = {
  overview: ["Overview", Overview],
  models: ["Models", Models],
  cluster: ["Cluster", Cluster],
  requests: ["Requests", Requests],
  playground: ["Playground", Playground],
  keys: ["Keys and limits", Keys],
  usage: ["Usage and bill", Usage],
  events: ["Events", Events],
  audit: ["Changes", Audit],
};
const MAX_SAMPLES = 900;
const AGAIN_MS = 2000;
const SHOWN_EVERY_MS = 100; // of samples that come faster, as after a pause of the tab, only the newest is parsed and shown
const pathOf = () => location.hash.replace(/^#\//, "").split("/");

const NoPage = () => html`<p class="empty">This address names no page. Choose one above.</p>`;

function SignIn({ onKey, note }) {
  const [error, setError] = useState(note);
  const submit = async (event) => {
    event.preventDefault();
    const given = new FormData(event.target).get("key").trim();
    try {
      await call("/v1/models?limit=1", { as: given });
      key.set(given);
      onKey();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<main><form class="sign-in" onSubmit=${submit}>
    <h1>Torchrelay</h1>
    <label>API key <input name="key" type="password" autocomplete="off" required autofocus /></label>
    <span class="dim">A tenant's key (tr-...) shows only the tenant's own data. The admin key (tra-..., in the file admin.key of the home) shows all.</span>
    ${error && html`<${Alert}>${error}<//>`}
    <button>Sign in</button></form></main>`;
}

// What plots need of an earlier sample: 900 whole samples of a large cluster would take hundreds of megabytes.
const figuresOf = ({ instances, relays, hosts, demand, ...figures }) => figures;

// The samples of the live stream, the newest last and alone whole, and what is wrong with the stream.
function useSamples(onRefusedKey) {
  const [samples, setSamples] = useState([]);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    let timer, newest, showing;
    const show = () => {
      showing = 0;
      setSamples((before) => [
        ...before.slice(1 - MAX_SAMPLES, -1),
        ...before.slice(-1).map(figuresOf),
        JSON.parse(newest),
      ]);
    };
    const follow = async () => {
      try {
        for await (newest of events(await call("/console/live", { signal: ended.signal }))) {
          setTrouble("");
          showing ||= setTimeout(show, SHOWN_EVERY_MS);
        }
        setTrouble("The live figures ended. Trying again.");
      } catch (failure) {
        if (ended.signal.aborted) return;
        if (failure.status === 401) return onRefusedKey();
        setTrouble(`No live figures: ${failure.message} Trying again; look whether the gateway runs.`);
      }
      if (!ended.signal.aborted) timer = setTimeout(follow, AGAIN_MS);
    };
    follow();
    return () => {
      ended.abort();
      clearTimeout(timer);
      clearTimeout(showing);
    };
  }, []);
  return [samples, trouble];
}

function Console({ onSignOut }) {
  const [[page, ...path], setPath] = useState(pathOf());
  const [samples, trouble] = useSamples(() => onSignOut("The key is no longer valid: sign in with another."));
  useEffect(() => {
    const turn = () => setPath(pathOf());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  useEffect(() => stopUpload, []); // at the end of its key
  const [title, Page] = PAGES[page || "overview"] ?? ["No such page", NoPage];
  const last = samples.at(-1);
  const isAdmin = key.get()?.startsWith("tra-");
  useEffect(() => {
    document.title = `${title} · Torchrelay`;
    // On a narrow screen the pages' names scroll.
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [title]);
  return html`<header><b>Torchrelay</b>
    <span class="dim">${isAdmin ? "admin" : last?.tenant}</span>
    <button onClick=${() => onSignOut("")}>Sign out</button>
    <nav aria-label="Pages">${Object.entries(PAGES).map(([name, [label]]) => html`<a href=${`#/${name}`} aria-current=${label === title ? "page" : undefined}>${label}</a>`)}</nav></header>
    <main><h1>${title}</h1>${trouble && html`<${Alert}>${trouble}<//>`}
    <${Page} samples=${samples} isAdmin=${isAdmin} path=${path} /></main>`;
}

function App() {
  const [isIn, setIsIn] = useState(key.get() !== null);
  const [note, setNote] = useState("");
  if (!isIn) return html`<${SignIn} note=${note} onKey=${() => setIsIn(true)} />`;
  return html`<${Console} onSignOut=${(why) => {
    key.forget();
    setNote(why);
    setIsIn(false);
  }} />`;
}

const root = document.getElementById("app");
root.replaceChildren(); // Preact would leave the placeholder's header beside the page's
render(html`<${App} />`, root);
