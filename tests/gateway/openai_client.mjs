// The official JavaScript client, unchanged, against a gateway: `node openai_client.mjs BASE_URL CHECK...`.
//
// Each check asserts what it can by itself and prints, as JSON lines, what the test wants to know beside that.
// test_javascript_client.py copies it beside the packages that it needs.

import assert from "node:assert/strict";
import OpenAI, { APIError, toFile } from "openai";

const [baseURL, ...asked] = process.argv.slice(2);
const messages = [{ role: "user", content: "Tell me of the sea." }];
// The tiny model of tests/engine says "A", and only that: its noise may end at once, or begin in the middle of a
// character, and then llama.cpp says no role. Other engines do not mind.
const letters = { logit_bias: { 68: 100 } };
const statuses = [];

function say(told) {
  process.stdout.write(JSON.stringify(told) + "\n");
}

function client(options = {}) {
  return new OpenAI({ baseURL, apiKey: process.env.KEY ?? "none", maxRetries: 0, ...options });
}

// An option of the client: what is sent passes as it is, and each status is told when it comes.
async function telling(url, init) {
  const answer = await fetch(url, init);
  statuses.push(answer.status);
  say({ status: answer.status });
  return answer;
}

const checks = {
  async chat() {
    const done = await client().chat.completions.create({ ...letters, model: "default", messages, max_tokens: 5 });
    assert.ok(done.choices[0].message.content);
    assert.equal(done.usage.completion_tokens, 5);
    assert.ok(done._request_id);
  },

  async stream() {
    const stream = await client().chat.completions.create({
      ...letters, model: "default", messages, max_tokens: 5, stream: true, stream_options: { include_usage: true },
    });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    const choices = chunks.flatMap((chunk) => chunk.choices);
    assert.ok(chunks.length > 1);
    assert.ok(choices.map((choice) => choice.delta.content ?? "").join(""));
    assert.ok(choices.some((choice) => choice.finish_reason === "length"));
    assert.equal(chunks.at(-1).usage.completion_tokens, 5);
  },

  // The helper that puts a stream together by itself is stricter than a loop.
  async streamHelper() {
    const stream = client().chat.completions.stream({ ...letters, model: "default", messages, max_tokens: 5 });
    const done = await stream.finalChatCompletion();
    assert.ok(done.choices[0].message.content);
    assert.equal(done.choices[0].finish_reason, "length");
  },

  async responses() {
    const asked = { ...letters, model: "default", input: "The sea", max_output_tokens: 16 };
    const done = await client().responses.create(asked);
    assert.ok(done.output_text);
    const types = [];
    for await (const event of await client().responses.create({ ...asked, stream: true })) types.push(event.type);
    assert.equal(types[0], "response.created");
    assert.match(types.at(-1), /^response\.(completed|incomplete)$/);
  },

  async embeddings() {
    const done = await client().embeddings.create({ model: "default", input: ["a", "b"] });
    assert.deepEqual(done.data.map((one) => one.index), [0, 1]);
    assert.ok(done.data[0].embedding.length > 1);
  },

  async models() {
    const ids = [];
    for await (const model of client().models.list()) ids.push(model.id);
    assert.ok(ids.length);
    assert.equal((await client().models.retrieve(ids[0])).id, ids[0]);
    await assert.rejects(client().models.retrieve("org/no-such-model"), OpenAI.NotFoundError);
  },

  async tools() {
    const tools = [{ type: "function", function: { name: "tide", parameters: { type: "object", properties: {} } } }];
    const done = await client().chat.completions.create({ model: "m", messages, tools, tool_choice: "required" });
    say(done.choices[0].message.tool_calls);
    const stream = client().chat.completions.stream({ model: "m", messages, tools, tool_choice: "required" });
    say((await stream.finalChatCompletion()).choices[0].message.tool_calls);
  },

  async batch() {
    const ai = client();
    const lines = Array.from({ length: 12 }, (_, n) => JSON.stringify({
      custom_id: `row-${n}`, method: "POST", url: "/v1/chat/completions",
      body: { model: "sim", messages, max_tokens: 3 },
    }));
    const input = await ai.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch" });
    assert.equal((await ai.files.retrieve(input.id)).filename, "in.jsonl");
    let batch = await ai.batches.create({
      input_file_id: input.id, endpoint: "/v1/chat/completions", completion_window: "24h", metadata: { run: "7" },
    });
    assert.equal(batch.status, "validating");
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      batch = await ai.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    assert.deepEqual(batch.request_counts, { total: 12, completed: 12, failed: 0 });
    const output = await (await ai.files.content(batch.output_file_id)).text();
    const ids = output.trim().split("\n").map((line) => JSON.parse(line).custom_id);
    assert.deepEqual(ids.sort(), lines.map((line) => JSON.parse(line).custom_id).sort());
    const listed = [];
    for await (const one of ai.batches.list({ limit: 1 })) listed.push(one.id);
    assert.deepEqual(listed, [batch.id]);
    assert.equal((await ai.files.delete(input.id)).deleted, true);
    await assert.rejects(ai.files.retrieve(input.id), OpenAI.NotFoundError);
  },

  async badInput() {
    await assert.rejects(
      client().chat.completions.create({ model: "m", messages: [] }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "messages",
    );
  },

  async wrongKey() {
    await assert.rejects(client({ apiKey: "sk-wrong" }).models.list(), OpenAI.AuthenticationError);
  },

  async retry() {
    const done = await client({ maxRetries: 5, fetch: telling })
      .chat.completions.create({ model: "m", messages });
    assert.equal(done.id, "c1");
    assert.deepEqual([statuses[0], statuses.at(-1)], [429, 200]);
  },

  async brokenStream() {
    const stream = await client().chat.completions.create({ model: "m", messages, stream: true });
    await assert.rejects(
      async () => { for await (const chunk of stream) say(chunk.choices[0].delta); },
      (error) => error instanceof APIError && error.code === "interrupted",
    );
  },

  async leave() {
    const stream = await client().chat.completions.create({ model: "m", messages, stream: true });
    for await (const chunk of stream) break; // the client closes its connection by that
    say("left");
    process.stdin.resume(); // and lives on, until the test has seen the engine
  },
};

for (const check of asked) {
  try {
    await checks[check]();
  } catch (error) {
    console.error(`the check ${check} failed:`, error);
    process.exit(1);
  }
}
