// Continue's adapter with the model of a configuration, whole and streamed. Prints both answers as JSON.
// node continue_check.mjs CONFIGURED_MODEL_AS_JSON QUESTION, with tests/clients/node_modules installed.
import { constructLlmApi } from "@continuedev/openai-adapters";

const [configured, question] = process.argv.slice(2);
const { provider, model, apiBase, apiKey } = JSON.parse(configured);
const api = constructLlmApi({ provider, apiBase, apiKey });
const body = { model, temperature: 0, messages: [{ role: "user", content: question }] };
const signal = new AbortController().signal;
const whole = await api.chatCompletionNonStream({ ...body, stream: false }, signal);
let streamed = "";
for await (const chunk of api.chatCompletionStream({ ...body, stream: true }, signal)) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify([whole.choices[0].message.content, streamed]));
