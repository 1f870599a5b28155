// The official client of Anthropic's API.

import Anthropic from "@anthropic-ai/sdk";
import { key, limitedKey, model, refusal, report, url } from "./results.mjs";

const client = new Anthropic({ apiKey: key, baseURL: url, maxRetries: 0 });
const messages = [{ role: "user", content: "Run." }];
const leg = {
  type: "object",
  properties: { runner: { enum: ["first", "last"] }, is_lit: { type: "boolean" } },
  required: ["runner", "is_lit"],
  additionalProperties: false,
};
const weather = { name: "weather", input_schema: { type: "object", properties: { city: { enum: ["Zürich", "Genève"] } }, required: ["city"], additionalProperties: false } };
const body = { model, max_tokens: 200, messages };

const listed = [];
for await (const entry of client.models.list()) listed.push(entry.id);
report("models", listed);
report("retrieved", (await client.models.retrieve(model)).id);

const message = await client.messages.create({ ...body, system: "Be brief." });
report("messages", { text: message.content[0].text, stop: message.stop_reason, usage: message.usage });
report("count", (await client.messages.countTokens({ model, messages, system: "Be brief." })).input_tokens);

const stream = client.messages.stream({ ...body, system: "Be brief." });
const types = [];
stream.on("streamEvent", (event) => types.push(event.type));
const final = await stream.finalMessage();
report("messages_stream", { text: await stream.finalText(), stop: final.stop_reason, usage: final.usage, types });

for (const choice of ["auto", "any", "tool"]) {
  const tool_choice = choice === "tool" ? { type: "tool", name: "weather", disable_parallel_tool_use: true } : { type: choice, disable_parallel_tool_use: true };
  const reply = await client.messages.create({ ...body, tools: [weather], tool_choice });
  const use = reply.content.find((block) => block.type === "tool_use");
  report(`tools_${choice}`, { name: use.name, input: use.input, stop: reply.stop_reason });
}

const toolStream = client.messages.stream({ ...body, tools: [weather] });
const use = (await toolStream.finalMessage()).content.find((block) => block.type === "tool_use");
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "rain" }] };
const second = await client.messages.create({ ...body, messages: [...messages, { role: "assistant", content: [use] }, result], tools: [weather] });
report("tool_result", { input: use.input, text: second.content[0].text });

const formatted = await client.messages.parse({ ...body, output_config: { format: { type: "json_schema", schema: leg } } });
report("parse", JSON.parse(formatted.content[0].text));

report("error_key", await refusal(new Anthropic({ apiKey: "tr-wrong", baseURL: url, maxRetries: 0 }).messages.create(body)));
report("error_model", await refusal(client.messages.create({ ...body, model: "clients/none" })));
report("error_field", await refusal(client.messages.create({ ...body, temperature: 9 })));

const limited = new Anthropic({ apiKey: limitedKey, baseURL: url, maxRetries: 0 });
await limited.messages.create(body);
report("error_rate", await refusal(limited.messages.create(body)));

const endless = client.messages.stream({ model, max_tokens: 3500, messages: [{ role: "user", content: "Count." }] });
let received = 0;
endless.on("text", () => {
  received += 1;
  if (received === 3) endless.abort();
});
let abortion = null;
await endless.done().catch((error) => (abortion = error.constructor.name));
report("abort", { received, error: abortion });
