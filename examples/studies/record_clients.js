// What record_clients.py has the AI SDK ask, which opencode and other agents in JavaScript ask with: URL MODEL.
const { generateText, streamText, generateObject, jsonSchema, stepCountIs, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const [url, name] = process.argv.slice(-2);
const provider = createOpenAICompatible({
  name: "local", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const settings = {
  model: provider(name), system: "Answer briefly.", temperature: 0, maxOutputTokens: 96, maxRetries: 0,
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Bonn", "Ulm"]) }),
  execute: async ({ city }) => `Sunny in ${city}.`,
});
const job = jsonSchema({
  type: "object", properties: { city: { type: "string", maxLength: 9 }, days: { enum: [1, 2] } },
  required: ["city", "days"], additionalProperties: false,
});
const questions = ["How is the weather in Bonn?", "How is the weather in Bonn, and in Ulm?"];

async function main() {
  const say = (step, told) => console.log(`${step}: ${JSON.stringify(told)}`);
  const chat = await generateText({ ...settings, prompt: questions[0] });
  say("chat", [chat.text, chat.usage, chat.finishReason]);
  const stream = streamText({ ...settings, prompt: questions[0] });
  let pieces = 0;
  for await (const _ of stream.textStream) pieces += 1;
  say("stream", [pieces, await stream.text, await stream.usage, await stream.finishReason]);
  const firstForced = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const agent = { ...settings, tools: { weather }, stopWhen: stepCountIs(2), prepareStep: firstForced };
  for (const prompt of questions) {
    const answer = await generateText({ ...agent, prompt });
    say("calls, results", [answer.steps.map((step) => step.toolCalls), answer.text]);
  }
  const calls = streamText({ ...agent, prompt: questions[0] });
  say("streamed calls, results", [(await calls.steps).map((step) => step.toolCalls), await calls.text]);
  const made = await generateObject({ ...settings, schema: job, prompt: questions[0] });
  say("structured", made.object);
  const local = { user: "me", reasoningEffort: "low", textVerbosity: "low", enable_thinking: false };
  const habits = { topP: 0.9, topK: 5, seed: 1, presencePenalty: 0.5, stopSequences: ["#"], providerOptions: { local } };
  say("settings", (await generateText({ ...settings, ...habits, prompt: questions[0] })).text);
}

main().catch((error) => { console.error(error); process.exit(1); });
