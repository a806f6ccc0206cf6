// npm's `openai` against a server: chat, streams, responses and their second turns, tools, errors. Arguments: url, key, model.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, key, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const greedy = { model, messages, temperature: 0, max_tokens: 12 };

const reply = await client.chat.completions.create(greedy);
const words = reply.choices[0].message.content;
assert.ok(words);
let told = "";
for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true })) {
  told += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(told, words);
const runner = client.chat.completions.stream(greedy);
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, words);

const first = await client.responses.create({ model, input: "Say hello.", temperature: 0, max_output_tokens: 12 });
assert.equal(first.output_text, words);
assert.equal(first.store, true);
const second = await client.responses.create({ model, input: "Again.", previous_response_id: first.id, max_output_tokens: 12 });
assert.equal(second.previous_response_id, first.id);
assert.equal((await client.responses.retrieve(first.id)).output_text, words);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);

const clock = { type: "function", function: { name: "clock", description: "The time of day." } };
const called = await client.chat.completions.create({
  model, messages, tools: [clock], tool_choice: "required", parallel_tool_calls: false, max_tokens: 100,
});
assert.equal(called.choices[0].message.tool_calls[0].function.arguments, "{}");

const vectors = await client.embeddings.create({ model, input: ["one", "two"] });
assert.equal(vectors.data.length, 2);
await assert.rejects(
  client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(20_000) }] }),
  (error) => error.code === "context_length_exceeded" && error.param === "messages",
);
