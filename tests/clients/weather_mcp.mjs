// An MCP server over standard input and output with one tool, which the embedded model knows how to call.
import readline from "node:readline";

const tool = {
  name: process.argv[2] ?? "get_weather",
  description: "Get the current weather of a city.",
  inputSchema: {
    type: "object",
    properties: { city: { type: "string", description: "The name of the city." } },
    required: ["city"],
    additionalProperties: false,
  },
  annotations: { readOnlyHint: true },
};
const answers = {
  initialize: (params) => ({
    protocolVersion: params.protocolVersion,
    capabilities: { tools: {} },
    serverInfo: { name: "weather", version: "1" },
  }),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": (params) => ({
    content: [
      { type: "text", text: JSON.stringify({ city: params.arguments.city, temperature: 18, condition: "sunny" }) },
    ],
  }),
  ping: () => ({}),
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const answer = answers[method];
  const outcome = answer ? { result: answer(params) } : { error: { code: -32601, message: "unknown method" } };
  process.stdout.write(`${JSON.stringify({ jsonrpc: "2.0", id, ...outcome })}\n`);
}
