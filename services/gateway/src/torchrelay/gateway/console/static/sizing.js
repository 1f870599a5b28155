// What a model takes of the platform's memory, and the speed that it has or would have there.
import { html, useEffect, useMemo, useState } from "/console/vendor/preact-htm.js";
import { json } from "/console/api.js";
import { bytes, count, rate, seconds } from "/console/format.js";
import { Answered, Facts, useAnswer } from "/console/parts.js";
import { Plot } from "/console/plot.js";

const speedOf = ({ curve, steps }) => {
  if (!curve.length) return "unknown until a model has run";
  const alone = `about ${rate(curve[0].tokens_per_s)} tokens/s`;
  if (curve.length === 1) return `${alone} (${steps.origin}, one request at a time)`;
  const most = Math.max(...curve.map(({ tokens_per_s }) => tokens_per_s));
  return `${alone} alone, ${rate(most)} at most (${steps.origin})`;
};
const fitOf = ({ fit, total }) => `fits ${count(fit)} of ${count(total)} ${total === 1 ? "host" : "hosts"}`;

// A line about a folder that is to be uploaded; nothing for an adapter, or where the gateway cannot read its config.
export function UploadSizing({ chosen, isInt8 }) {
  const [text, setText] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    const ask = async () => {
      const config = chosen.find(([path]) => path === "config.json");
      if (!config) return;
      const weights = chosen.filter(([path]) => path.endsWith(".safetensors"));
      const body = {
        config: JSON.parse(await config[1].text()),
        weights_bytes: weights.reduce((sum, [, { size }]) => sum + size, 0),
        quantize: isInt8,
      };
      const sizing = await json("/v1/sizing", { method: "POST", body, signal: ended.signal });
      const size = `${bytes(Math.round(sizing.footprint.weights_bytes))} of weights`;
      setText([size, ...(sizing.hosts ? [fitOf(sizing.hosts)] : []), speedOf(sizing)].join(", "));
    };
    ask().catch((failure) => ended.signal.aborted || setText(`Its size is not known: ${failure.message}`));
    return () => ended.abort();
  }, [chosen, isInt8]);
  return text && html`<span role="status">${text}</span>`;
}

function Curve({ curve }) {
  const data = useMemo(
    () => [curve.map(({ tbt_s }) => tbt_s * 1000), curve.map(({ tokens_per_s }) => tokens_per_s)],
    [curve],
  );
  const [first, last] = [data[0][0], data[0].at(-1)];
  const title = `Tokens/s of an instance against ms between tokens, with 1 to ${count(curve.at(-1).num_choices)} requests at once`;
  return html`<${Plot} title=${title} data=${data} range=${[0, Math.max(last, first * 1.01)]} isOfFigures height=${220} />`;
}

export function Sizing({ id }) {
  const answer = useAnswer(`/v1/sizing?model=${encodeURIComponent(id)}`, 10_000);
  return html`<${Answered} answer=${answer}>${(sizing) => {
    const { footprint, hosts, curve } = sizing;
    const facts = {
      "In memory": hosts ? fitOf(hosts) : bytes(footprint.weights_bytes),
      "KV per token": bytes(footprint.kv_bytes_per_token),
      Speed: speedOf(sizing),
      ...(curve.length > 0 && {
        "With one request": `first token in ${seconds(curve[0].ttft_s)}, then ${seconds(curve[0].tbt_s)} each`,
      }),
    };
    return html`<${Facts} facts=${facts} />${curve.length > 1 && html`<${Curve} curve=${curve} />`}`;
  }}<//>`;
}
