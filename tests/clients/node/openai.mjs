// The official client of OpenAI's API.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { embeddingModel, key, limitedKey, model, refusal, report, url } from "./results.mjs";

const client = new OpenAI({ apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
const messages = [{ role: "user", content: "Run." }];
const Leg = z.object({ runner: z.enum(["first", "last"]), is_lit: z.boolean() });
const City = z.object({ city: z.enum(["Zürich", "Genève"]) });
const weather = zodFunction({ name: "weather", parameters: City });
const responseTool = { type: "function", name: "weather", parameters: weather.function.parameters, strict: true };

const listed = [];
for await (const entry of client.models.list()) listed.push(entry.id);
report("models", listed);
report("retrieved", (await client.models.retrieve(model)).id);

const chat = await client.chat.completions.create({ model, messages });
report("chat", { text: chat.choices[0].message.content, finish: chat.choices[0].finish_reason, usage: chat.usage });

const chunks = client.chat.completions.stream({ model, messages, stream_options: { include_usage: true } });
const deltas = [];
chunks.on("content", (delta) => deltas.push(delta));
report("chat_stream", { text: await chunks.finalContent(), deltas, usage: await chunks.totalUsage() });

const parsed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Leg, "leg") });
report("chat_parse", Leg.parse(parsed.choices[0].message.parsed));

for (const choice of ["auto", "required", { type: "function", function: { name: "weather" } }]) {
  const reply = await client.chat.completions.parse({ model, messages, tools: [weather], tool_choice: choice, parallel_tool_calls: false });
  const [call] = reply.choices[0].message.tool_calls;
  report(`chat_tools_${choice.type ?? choice}`, { name: call.function.name, arguments: call.function.parsed_arguments, finish: reply.choices[0].finish_reason });
}

const runner = client.chat.completions.runTools({
  model,
  messages,
  stream: true,
  tools: [{ type: "function", function: { name: "weather", parameters: weather.function.parameters, parse: JSON.parse, function: ({ city }) => `rain in ${city}` } }],
});
report("chat_run_tools", { text: await runner.finalContent(), result: await runner.finalFunctionToolCallResult() });

const response = await client.responses.create({ model, input: "Run." });
report("responses", { text: response.output_text, status: response.status, usage: response.usage });

const types = [];
let streamed = "";
for await (const event of await client.responses.create({ model, input: "Run.", stream: true })) {
  types.push(event.type);
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
report("responses_stream", { text: streamed, types });

const parsedResponse = await client.responses.parse({ model, input: "Run.", text: { format: zodTextFormat(Leg, "leg") } });
report("responses_parse", parsedResponse.output_parsed);

const called = await client.responses.create({ model, input: "Run.", tools: [responseTool] });
const [call] = called.output.filter((item) => item.type === "function_call");
const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
const second = await client.responses.create({ model, input: [{ role: "user", content: "Run." }, ...called.output, result], tools: [responseTool] });
report("responses_tools", { name: call.name, arguments: JSON.parse(call.arguments), text: second.output_text });

const floats = await client.embeddings.create({ model: embeddingModel, input: ["torch", "baton"], encoding_format: "float" });
const base64 = await client.embeddings.create({ model: embeddingModel, input: ["torch", "baton"] });
report("embeddings", { floats: floats.data.map((item) => item.embedding), base64: base64.data.map((item) => item.embedding), usage: floats.usage });

const completion = await client.completions.create({ model, prompt: "<|text|>", max_tokens: 20 });
report("completions", completion.choices[0].text);

report("error_key", await refusal(client.withOptions({ apiKey: "tr-wrong" }).chat.completions.create({ model, messages })));
report("error_model", await refusal(client.chat.completions.create({ model: "clients/none", messages })));
report("error_field", await refusal(client.chat.completions.create({ model, messages, temperature: 9 })));
report("error_response_field", await refusal(client.responses.create({ model, input: "Run.", max_output_tokens: -1 })));

const limited = client.withOptions({ apiKey: limitedKey });
await limited.chat.completions.create({ model, messages });
report("error_rate", await refusal(limited.chat.completions.create({ model, messages })));

const controller = new AbortController();
const endless = await client.chat.completions.create({ model, messages: [{ role: "user", content: "Count." }], stream: true, max_tokens: 3500 }, { signal: controller.signal });
let received = 0;
for await (const chunk of endless) {
  received += chunk.choices[0]?.delta.content ? 1 : 0;
  if (received === 3) controller.abort();
}
report("abort", received);
