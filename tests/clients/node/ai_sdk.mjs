// Vercel's AI SDK with its provider for servers that speak OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { embeddingModel, key, model, report, url } from "./results.mjs";

const provider = createOpenAICompatible({ name: "torchrelay", baseURL: `${url}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const chat = provider(model);
const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => `rain in ${city}` });

const answer = await generateText({ model: chat, prompt: "Run." });
report("generate", { text: answer.text, finish: answer.finishReason, usage: answer.usage.outputTokens });

const stream = streamText({ model: chat, prompt: "Run." });
const parts = [];
for await (const part of stream.textStream) parts.push(part);
report("stream", { parts, finish: await stream.finishReason, usage: (await stream.usage).outputTokens });

const steps = await generateText({ model: chat, prompt: "Run.", tools: { weather }, stopWhen: stepCountIs(3) });
report("tools", { calls: steps.steps[0].toolCalls.map((call) => [call.toolName, call.input]), text: steps.text, steps: steps.steps.length });

const streamed = streamText({ model: chat, prompt: "Run.", tools: { weather }, stopWhen: stepCountIs(3) });
report("stream_tools", { text: await streamed.text, steps: (await streamed.steps).length });

const Leg = z.object({ runner: z.enum(["first", "last"]), is_lit: z.boolean() });
const structured = await generateText({ model: chat, prompt: "Run.", output: Output.object({ schema: Leg }) });
report("object", structured.output);

const { embeddings } = await embedMany({ model: provider.embeddingModel(embeddingModel), values: ["torch", "baton"] });
report("embeddings", embeddings.map((vector) => vector.length));

const controller = new AbortController();
let received = 0;
try {
  for await (const _ of streamText({ model: chat, prompt: "Count.", maxOutputTokens: 3500, abortSignal: controller.signal }).textStream) {
    received += 1;
    if (received === 3) controller.abort();
  }
} catch (error) {
  if (error.name !== "AbortError") throw error;
}
report("abort", received);

try {
  await generateText({ model: provider("clients/none"), prompt: "Run.", maxRetries: 0 });
} catch (error) {
  report("error_model", { status: error.statusCode, message: error.message });
}
