// Vercel's `ai` against a server: over responses (its default), chat, and as any OpenAI-compatible one. Arguments: url, key, model.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, key, name] = process.argv.slice(2);
const sent = [];
const recording = (where, asked) => { sent.push(String(asked?.body ?? "")); return fetch(where, asked); };
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key, fetch: recording });
const compatible = createOpenAICompatible({ name: "shardcompute", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true });
const place = z.object({ city: z.enum(["Rome", "Oslo"]) });
const greedy = { maxRetries: 0, temperature: 0, maxOutputTokens: 60 };

for (const model of [openai(name), openai.chat(name), compatible(name)]) {
  const where = `${model.provider} ${model.modelId}`;
  const first = await generateText({ model, ...greedy, prompt: "Say hello." });
  assert.ok(first.text, where);

  // The second turn refers to items of the first by their ids, where the provider has any.
  const talk = [{ role: "user", content: "Say hello." }, ...first.response.messages, { role: "user", content: "Again." }];
  assert.ok((await generateText({ model, ...greedy, messages: talk })).text, where);

  let told = "";
  for await (const piece of streamText({ model, ...greedy, prompt: "Say hello.", onError: ({ error }) => { throw error; } }).textStream) told += piece;
  assert.equal(told, first.text, where);

  const found = await generateObject({ model, ...greedy, schema: place, prompt: "Anna lives in Rome." });
  assert.ok(["Rome", "Oslo"].includes(found.object.city), where);

  let calls = 0;
  const clock = tool({ description: "The time of day.", inputSchema: z.object({}), execute: async () => { calls += 1; return "noon"; } });
  await generateText({
    model, ...greedy, prompt: "What time is it?", tools: { clock }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  assert.ok(calls > 0, where);
}
assert.ok(sent.some((body) => body.includes('"item_reference"')), "second turns over responses refer to what was kept");
