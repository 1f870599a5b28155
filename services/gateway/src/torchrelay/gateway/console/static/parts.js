// Parts of several pages.
import { html, useEffect, useState } from "/console/vendor/preact-htm.js";
import { json } from "/console/api.js";
import { modelPage, phaseName, seconds, time } from "/console/format.js";

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
    Promise.all(paths.map((each) => json(each, { signal: ended.signal })))
      .then(
        (data) => setAnswer({ path, data, error: "" }),
        (failure) =>
          ended.signal.aborted ||
          setAnswer((before) => ({ ...before, error: failure.message, status: failure.status })),
      )
      .then(() => {
        if (everyMs && !ended.signal.aborted) timer = setTimeout(again, everyMs);
      });
    return () => {
      ended.abort();
      clearTimeout(timer);
    };
  }, [path, turn]);
  return answer.path === path ? { ...answer, again } : { ...answer, data: null, again };
}

export function useAnswer(path, everyMs) {
  const { data, ...others } = useAnswers([path], everyMs);
  return { data: data && data[0], ...others };
}

export const Loading = () => html`<p class="dim">Loading.</p>`;
export const Alert = ({ children }) => html`<p class="error" role="alert">${children}</p>`;

// The error of an answer (of useAnswer), if any, and what `children` makes of its data; without data, that it is awaited.
export const Answered = ({ answer: { data, error }, children }) =>
  html`${error && html`<${Alert}>${error}<//>`}
  ${data ? children(data) : !error && html`<${Loading} />`}`;

export const ModelLink = ({ id }) => html`<a href=${modelPage(id)}>${id}</a>`;
// `facts`: what is shown, by its label.
export const Facts = ({ facts }) =>
  html`<dl>${Object.entries(facts).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
export const Cards = ({ cards }) =>
  html`<div class="cards">${Object.entries(cards).map(([label, value]) => html`<div class="card"><span>${label}</span><strong>${value}</strong></div>`)}</div>`;

// A choice between `options`, [value, text] or a value that is its own text.
// Without `onChange` it is a field of a form: a value would undo a choice at each render.
export const Select = ({ label, options, value, onChange, isInline, children, ...attributes }) =>
  html`<label class=${isInline && "inline"}>${label} <select ...${attributes} value=${onChange && value} onChange=${onChange && ((event) => onChange(event.target.value))}>
  ${options.map((option) => [option].flat()).map(([name, text = name]) => html`<option value=${name} selected=${name === value}>${text}</option>`)}</select>${children}</label>`;

// Phases, [name, begin, end] in microseconds, as bars on one scale of time.
export function PhaseBars({ phases }) {
  const begin = Math.min(...phases.map(([, from]) => from));
  const whole = Math.max(...phases.map(([, , to]) => to)) - begin || 1;
  const share = (us) => (us / whole) * 100;
  return html`<ul class="timeline">${phases.map(
    ([name, from, to]) =>
      html`<li><span>${phaseName(name)}</span>
    <svg aria-hidden="true"><rect x=${`${share(from - begin)}%`} width=${`${Math.max(share(to - from), 0.5)}%`} height="100%" /></svg>
    <span class="number">${seconds((to - from) / 1e6)}</span></li>`,
  )}</ul>`;
}

// `columns`: [title, function of a row, "number" for right alignment or "time" for one line]. Without rows the children
// say what to do next.
export function Table({ label, columns, rows, total, children }) {
  if (rows.length === 0) return html`<p class="empty">${children}</p>`;
  const cells = (row) =>
    columns.map(([, of, kind], place) =>
      place ? html`<td class=${kind}>${of(row)}</td>` : html`<th scope="row" class=${kind}>${of(row)}</th>`,
    );
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
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<form onSubmit=${submit}><div class="row">${children}<button>${label}</button> <span role="status">${isSent && note}</span></div>${error && html`<${Alert}>${error}<//>`}</form>`;
}

// A button that asks before it acts.
export function Confirm({ label, question, onYes }) {
  const [isAsking, setIsAsking] = useState(false);
  if (!isAsking) return html`<button type="button" onClick=${() => setIsAsking(true)}>${label}</button>`;
  return html`<span class="row">${question}
    <button type="button" onClick=${() => {
      setIsAsking(false);
      onYes();
    }}>Yes</button>
    <button type="button" onClick=${() => setIsAsking(false)}>No</button></span>`;
}

const DECISION_COLUMNS = [
  ["Time, UTC", (each) => time(each.at_unix_us / 1e6), "time"],
  ["Decision", (each) => each.kind],
  ["About", (each) => each.subject],
  ["Reason", (each) => each.reason],
];
export const Decisions = ({ decisions, children }) =>
  html`<${Table} label="Decisions" columns=${DECISION_COLUMNS} rows=${[...decisions].reverse()}>${children}<//>`;
