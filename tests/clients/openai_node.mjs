// OpenAI's Node client against a server: node openai_node.mjs URL. Exits with an error at the first surprise.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "secret", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];

const whole = await client.chat.completions.create({ model: "null", messages: user("héllo 🦊") });
assert.equal(whole.choices[0].message.content, "héllo 🦊");

let text = "";
const stream = await client.chat.completions.create({ model: "null", messages: user("héllo 🦊"), stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, "héllo 🦊");

const call = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>';
const tools = [{ type: "function", function: { name: "look", parameters: { type: "object", properties: {} } } }];
const runner = client.chat.completions.stream({ model: "null", messages: user(call), tools });
const final = await runner.finalChatCompletion();
assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { at: "sky" });

const response = await client.responses.create({ model: "null", input: "hello" });
assert.equal(response.output_text, "hello");

await assert.rejects(client.chat.completions.create({ model: "null", messages: user("x"), temperature: -1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
console.log("ok");
