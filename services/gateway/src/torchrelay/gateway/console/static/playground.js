import { html, useState } from "/console/vendor/preact-htm.js";
import { call, events } from "/console/api.js";
import { requestPage, seconds } from "/console/format.js";
import { Alert, Select, useAnswer } from "/console/parts.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const curl = (body) => `curl -N ${location.origin}/v1/chat/completions -H "Authorization: Bearer $KEY" \\
    -H "Content-Type: application/json" -d ${quoted(JSON.stringify(body))}`;
const python = (body) => `import json, os, openai

client = openai.OpenAI(base_url="${location.origin}/v1", api_key=os.environ["KEY"])
body = json.loads(${JSON.stringify(JSON.stringify(body))})
for chunk in client.chat.completions.create(**body):
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)`;

function bodyOf(form) {
  const sampling = Object.fromEntries(
    ["temperature", "top_p", "max_tokens", "seed"]
      .filter((name) => form.get(name))
      .map((name) => [name, Number(form.get(name))]),
  );
  const system = form.get("system") && { role: "system", content: form.get("system") };
  return {
    model: form.get("model"),
    messages: [system, { role: "user", content: form.get("prompt") }].filter(Boolean),
    ...sampling,
    ...(form.get("tools") && { tools: JSON.parse(form.get("tools")) }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

export function Playground({ isAdmin }) {
  const models = useAnswer("/v1/models");
  const [body, setBody] = useState(null);
  const [answer, setAnswer] = useState("");
  const [figures, setFigures] = useState("");
  const [id, setId] = useState("");
  const [error, setError] = useState("");
  const [running, setRunning] = useState(null); // the controller of the request under way
  const submit = async (event) => {
    event.preventDefault();
    setAnswer("");
    setFigures("");
    setId("");
    setError("");
    setBody(null);
    const request = new AbortController();
    setRunning(request);
    try {
      const asked = bodyOf(new FormData(event.target));
      setBody(asked);
      const begin = performance.now();
      let first = 0;
      const response = await call("/v1/chat/completions", { method: "POST", body: asked, signal: request.signal });
      for await (const data of events(response, setFigures)) {
        // comments tell how far the model is loaded
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        setId(chunk.id);
        const delta = chunk.choices[0]?.delta ?? {};
        const text =
          (delta.reasoning_content ?? "") +
          (delta.content ?? "") +
          (delta.tool_calls ? JSON.stringify(delta.tool_calls) : "");
        if (text) {
          first ||= performance.now();
          setAnswer((before) => before + text);
        }
        if (chunk.usage) {
          const tookS = (performance.now() - begin) / 1000;
          setFigures(
            `TTFT ${first ? seconds((first - begin) / 1000) : "none"}, ${chunk.usage.completion_tokens} tokens in ${seconds(tookS)}, ${(chunk.usage.completion_tokens / tookS).toFixed(1)} tokens/s`,
          );
        }
      }
    } catch (failure) {
      setError(
        request.signal.aborted
          ? "You stopped the answer."
          : failure instanceof SyntaxError
            ? `Tools: ${failure.message}`
            : failure.message,
      );
    }
    setRunning(null);
  };
  const sendOnEnter = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) event.target.form.requestSubmit();
  };
  if (isAdmin)
    return html`<p class="empty">
    The admin key cannot chat, since nobody would pay. Sign in with a tenant's key.</p>`;
  const chats = (models.data?.data ?? []).filter((model) => model.tasks.includes("generate"));
  if (models.data && chats.length === 0)
    return html`<p class="empty">
    There is no model yet that answers: <a href="#/models">upload one</a>.</p>`;
  return html`<form onSubmit=${submit}>
    <${Select} label="Model" name="model" options=${chats.map((model) => model.id)} />
    <label>Prompt <textarea name="prompt" rows="3" required onKeyDown=${sendOnEnter} title="Enter sends it, Shift and Enter begin a line"></textarea></label>
    <details><summary>Settings</summary>
      <label>System message <textarea name="system" rows="2"></textarea></label>
      <div class="row">
        <label>Temperature <input name="temperature" type="number" min="0" max="2" step="0.1" defaultValue="0" /></label>
        <label>Top P <input name="top_p" type="number" min="0" max="1" step="0.05" placeholder="1" /></label>
        <label>Maximum tokens <input name="max_tokens" type="number" min="1" defaultValue="128" /></label>
        <label>Seed <input name="seed" type="number" step="1" /></label></div>
      <label>Tools, a JSON array <textarea name="tools" rows="3"></textarea></label></details>
    <div class="row"><button disabled=${running || !models.data}>Send</button>
    ${running && html`<button type="button" onClick=${() => running.abort()}>Stop</button>`}</div></form>
    ${models.error && html`<${Alert}>${models.error}<//>`}
    ${error && html`<${Alert}>${error}<//>`}
    ${
      body &&
      html`<h2>Answer</h2><pre id="answer" aria-live="polite">${answer}</pre><p class="dim" id="figures">${figures}</p>
    ${id && !running && html`<p><a href=${requestPage(id)}>Where its time went</a></p>`}
    <h2>The request</h2><h3>curl</h3><pre id="curl">${curl(body)}</pre><h3>Python</h3><pre id="python">${python(body)}</pre>`
    }`;
}
