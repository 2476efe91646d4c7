// The openai package for Node: whole, streamed, by its helper, a tool call, a refusal.
import OpenAI from "openai";
import { ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MESSAGES, MODEL, PARAMETERS, tell, tellCall } from "./asked.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, messages: MESSAGES, max_tokens: MAX_TOKENS, temperature: 0 };

tell("chat", (await client.chat.completions.create(asked)).choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
tell("stream", text);
tell("stream helper", await client.chat.completions.stream(asked).finalContent());
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters: PARAMETERS } }];
const called = await client.chat.completions.create({
  ...asked, max_tokens: FORM_TOKENS, messages: [{ role: "user", content: ASKS_WEATHER }], tools, tool_choice: "required", parallel_tool_calls: false,
});
const call = called.choices[0].message.tool_calls[0].function;
tellCall("tool call", call.name, JSON.parse(call.arguments));
try {
  await client.chat.completions.create({ ...asked, model: "gpt-9" });
  throw new Error("a model that does not exist");
} catch (error) {
  if (!(error instanceof OpenAI.NotFoundError) || error.code !== "model_not_found") throw error;
}
