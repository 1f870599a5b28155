// Parts of several pages.
import { html, useEffect, useState } from "/console/vendor/preact-htm.js";
import { json } from "/console/api.js";
import { time } from "/console/format.js";

// REST answers: their data (null before the first), an error and its status, and a function that asks again. They are
// asked for again `everyMs` after they came, so that answers slower than that are shown as well.
export function useAnswers(paths, everyMs = 0) {
  const path = paths.join("\n");
  const [answer, setAnswer] = useState({ path, data: null, error: "" });
  const [turn, setTurn] = useState(0);
  const again = () => setTurn((before) => before + 1);
  useEffect(() => {
    const ended = new AbortController();
    let timer;
    Promise.all(paths.map((each) => json(each, { signal: ended.signal }))).then(
      (data) => setAnswer({ path, data, error: "" }),
      (failure) => ended.signal.aborted || setAnswer((before) => ({ ...before, error: failure.message, status: failure.status })),
    ).then(() => { if (everyMs && !ended.signal.aborted) timer = setTimeout(again, everyMs); });
    return () => { ended.abort(); clearTimeout(timer); };
  }, [path, turn]);
  return answer.path === path ? { ...answer, again } : { ...answer, data: null, again };
}

export function useAnswer(path, everyMs) {
  const { data, ...others } = useAnswers([path], everyMs);
  return { data: data && data[0], ...others };
}

export const Loading = () => html`<p class="dim">Loading.</p>`;
export const Alert = ({ children }) => html`<p class="error" role="alert">${children}</p>`;

// `columns`: [title, function of a row, "number" for right alignment or "time" for one line]. Without rows the children
// say what to do next.
export function Table({ label, columns, rows, total, children }) {
  if (rows.length === 0) return html`<p class="empty">${children}</p>`;
  const cells = (row) => columns.map(([, of, kind], place) => (place ? html`<td class=${kind}>${of(row)}</td>`
    : html`<th scope="row" class=${kind}>${of(row)}</th>`));
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row)}</tr>`)}</tbody>
    ${total && html`<tfoot><tr>${cells(total)}</tr></tfoot>`}</table></div>`;
}

// A form that sends its fields, and tells what the gateway refuses. The fields have a defaultValue: a value would undo
// what was typed at each render.
export function Sender({ label, note = "", send, children }) {
  const [error, setError] = useState("");
  const [isSent, setIsSent] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = event.target;
    setIsSent(false);
    try {
      await send(new FormData(form));
      form.reset();
      setError("");
      setIsSent(true);
    } catch (failure) { setError(failure.message); }
  };
  return html`<form onSubmit=${submit}><div class="row">${children}<button>${label}</button> <span role="status">${isSent && note}</span></div>${error && html`<${Alert}>${error}<//>`}</form>`;
}

// A button that asks before it acts.
export function Confirm({ label, question, onYes }) {
  const [isAsking, setIsAsking] = useState(false);
  if (!isAsking) return html`<button type="button" onClick=${() => setIsAsking(true)}>${label}</button>`;
  return html`<span class="row">${question}
    <button type="button" onClick=${() => { setIsAsking(false); onYes(); }}>Yes</button>
    <button type="button" onClick=${() => setIsAsking(false)}>No</button></span>`;
}

const DECISION_COLUMNS = [
  ["Time, UTC", (each) => time(each.at_unix_us / 1e6), "time"],
  ["Decision", (each) => each.kind],
  ["About", (each) => each.subject],
  ["Reason", (each) => each.reason],
];
export const Decisions = ({ decisions, children }) => html`<${Table} label="Decisions" columns=${DECISION_COLUMNS} rows=${[...decisions].reverse()}>${children}<//>`;

// What the scheduler decided about a model, the newest first, and what a slot is worth to it.
export function Explained({ path }) {
  const { data, error } = useAnswer(path, 5000);
  return html`${error && html`<${Alert}>${error}<//>`}
    ${data?.worth?.length > 0 && html`<dl>${data.worth.map(({ label, text }) => html`<div><dt>${label}</dt><dd>${text}</dd></div>`)}</dl>`}
    ${data && html`<${Decisions} decisions=${data.decisions}>The scheduler has decided nothing about it since it began.<//>`}`;
}
