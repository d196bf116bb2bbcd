// The official npm client: stream and abort. Prints one JSON object; usage: node openai_check.mjs BASE_URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Tell me a short story." }];

const whole = await client.chat.completions.create({ model: "quire-demo", messages, temperature: 0, max_tokens: 60 });
let streamed = "";
let finish = null;
for await (const chunk of await client.chat.completions.create({
  model: "quire-demo", messages, temperature: 0, max_tokens: 60, stream: true,
})) {
  streamed += chunk.choices[0].delta.content ?? "";
  finish = chunk.choices[0].finish_reason ?? finish;
}

const controller = new AbortController();
let chunksBeforeAbort = 0;
let aborted = false;
try {
  const stream = await client.completions.create(
    { model: "quire-demo", prompt: "Once", max_tokens: 1500, ignore_eos: true, stream: true },
    { signal: controller.signal },
  );
  for await (const _ of stream) {
    chunksBeforeAbort += 1;
    if (chunksBeforeAbort === 3) controller.abort();
  }
  aborted = controller.signal.aborted;
} catch (error) {
  aborted = error instanceof OpenAI.APIUserAbortError || error.name === "AbortError";
}

let code = null;
try {
  await client.completions.create({ model: "missing", prompt: "x" });
} catch (error) {
  code = error instanceof OpenAI.NotFoundError ? error.code : String(error);
}
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, finish, chunksBeforeAbort, aborted, code }));
