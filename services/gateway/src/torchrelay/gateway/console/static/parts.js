// Parts of several pages.
import { html, useEffect, useState } from "/console/vendor/preact-htm.js";
import { json } from "/console/api.js";

// A REST answer: its data (null before the first), its error, and a function that asks again.
export function useAnswer(path, everyMs = 0) {
  const [answer, setAnswer] = useState({ path, data: null, error: "" });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const ended = new AbortController();
    json(path, { signal: ended.signal }).then(
      (data) => setAnswer({ path, data, error: "" }),
      (failure) => ended.signal.aborted || setAnswer((before) => ({ ...before, error: failure.message })),
    );
    const timer = everyMs && setInterval(() => setTurn((before) => before + 1), everyMs);
    return () => { ended.abort(); clearInterval(timer); };
  }, [path, turn]);
  const again = () => setTurn((before) => before + 1);
  return answer.path === path ? { ...answer, again } : { data: null, error: answer.error, again };
}

export const Alert = ({ children }) => html`<p class="error" role="alert">${children}</p>`;

// `columns`: [title, function of a row, "number" for right alignment]. Without rows the children say what to do next.
export function Table({ label, columns, rows, total, children }) {
  if (rows.length === 0) return html`<p class="dim">${children}</p>`;
  const cells = (row) => columns.map(([title, of, kind], place) => (place ? html`<td class=${kind}>${of(row)}</td>` : html`<th scope="row">${of(row)}</th>`));
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row)}</tr>`)}</tbody>
    ${total && html`<tfoot><tr>${cells(total)}</tr></tfoot>`}</table></div>`;
}
