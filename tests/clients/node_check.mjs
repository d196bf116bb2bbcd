// The npm packages against a running server: openai, the AI SDK of Vercel, Anthropic's, ollama. Prints what failed, exits 1.
// node node_check.mjs BASE_URL KEY, with tests/clients/node_modules installed.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import * as ai from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const model = "quire-demo";
const question = "What is the weather in Paris?";
const result = '{"city": "Paris", "temperature": 18, "condition": "sunny"}';
const description = "Get the current weather of a city.";
const parameters = {
  type: "object",
  properties: { city: { type: "string", description: "The name of the city." } },
  required: ["city"],
  additionalProperties: false,
};
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const anthropic = new Anthropic({ baseURL: url, apiKey: key });
const ollama = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
const compatible = createOpenAICompatible({
  name: "quire",
  baseURL: `${url}/v1`,
  apiKey: key,
  supportsStructuredOutputs: true,
});

const checks = {
  async "ollama: an agent loop"() {
    const options = { temperature: 0, num_predict: 200 };
    const tools = [{ type: "function", function: { name: "get_weather", description, parameters } }];
    const messages = [{ role: "user", content: question }];
    const first = await ollama.chat({ model, messages, tools, options });
    const [call] = first.message.tool_calls;
    assert.deepEqual(call.function.arguments, { city: "Paris" });
    messages.push(first.message, { role: "tool", tool_name: "get_weather", content: result });
    assert.match((await ollama.chat({ model, messages, tools, options })).message.content, /18/);
  },
  async "ollama: streams, vectors, lists, errors"() {
    const asked = { model, prompt: "What is the capital of Japan?", options: { temperature: 0 } };
    const whole = await ollama.generate(asked);
    let text = "";
    for await (const part of await ollama.generate({ ...asked, stream: true })) text += part.response;
    assert.equal(text, whole.response);
    assert.match(text, /Tokyo/);
    assert.equal((await ollama.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
    assert.deepEqual((await ollama.list()).models.map((each) => each.name), [model]);
    assert.ok((await ollama.show({ model })).capabilities.includes("tools"));
    assert.ok((await ollama.version()).version);
    await assert.rejects(ollama.chat({ model: "llama3", messages: [] }), /does not exist/);
  },
  async "openai: an agent loop"() {
    const tools = [{ type: "function", function: { name: "get_weather", description, parameters } }];
    const messages = [{ role: "user", content: question }];
    const first = await openai.chat.completions.create({ model, messages, tools, temperature: 0 });
    const [call] = first.choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: result });
    const second = await openai.chat.completions.create({ model, messages, tools, temperature: 0 });
    assert.match(second.choices[0].message.content, /18/);
  },
  async "openai: a streamed call"() {
    const tools = [{ type: "function", function: { name: "get_weather", description, parameters } }];
    const stream = openai.chat.completions.stream({
      model,
      messages: [{ role: "user", content: question }],
      tools,
      temperature: 0,
    });
    const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  },
  async "openai: responses"() {
    const whole = await openai.responses.create({ model, input: "What is the capital of Japan?", temperature: 0 });
    assert.match(whole.output_text, /Tokyo/);
    let text = "";
    const stream = await openai.responses.create({
      model,
      input: "What is the capital of Japan?",
      temperature: 0,
      stream: true,
    });
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, whole.output_text);
  },
  async "ai: text and stream"() {
    const prompt = "What is the capital of Japan?";
    const { text } = await ai.generateText({ model: compatible(model), prompt, temperature: 0 });
    assert.match(text, /Tokyo/);
    let streamed = "";
    for await (const part of ai.streamText({ model: compatible(model), prompt, temperature: 0 }).textStream)
      streamed += part;
    assert.equal(streamed, text);
  },
  async "ai: an agent loop"() {
    const get_weather = ai.tool({
      description,
      inputSchema: z.object({ city: z.string().describe("The name of the city.") }),
      execute: async ({ city }) => {
        assert.equal(city, "Paris");
        return JSON.parse(result);
      },
    });
    const { text, steps } = await ai.generateText({
      model: compatible(model),
      prompt: question,
      tools: { get_weather },
      stopWhen: ai.stepCountIs(4),
      temperature: 0,
    });
    assert.equal(steps.length, 2);
    assert.match(text, /18/);
  },
  async "ai: an object"() {
    const schema = z.object({ name: z.string(), age: z.number(), city: z.string() });
    const { output } = await ai.generateText({
      model: compatible(model),
      output: ai.Output.object({ schema }),
      prompt: "JSON for a person named Anna who is 30 years old and lives in Rome.",
      temperature: 0,
    });
    assert.ok(schema.parse(output));
  },
  async "anthropic: an agent loop"() {
    const tools = [{ name: "get_weather", description, input_schema: parameters }];
    const messages = [{ role: "user", content: question }];
    const first = await anthropic.messages.create({ model, max_tokens: 200, messages, tools });
    const call = first.content.find((block) => block.type === "tool_use");
    assert.deepEqual(call.input, { city: "Paris" });
    messages.push(
      { role: "assistant", content: first.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: result }] },
    );
    const stream = anthropic.messages.stream({ model, max_tokens: 200, messages, tools });
    assert.match(await stream.finalText(), /18/);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`failed ${name}: ${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
