// Vercel's AI SDK with its openai-compatible provider: generateText, streamText, a tool call, a schema.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PARAMETERS, PROMPT, tell, tellCall } from "./asked.mjs";

const here = createOpenAICompatible({ name: "here", baseURL: BASE, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const asked = { model: here(MODEL), prompt: PROMPT, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };

tell("generateText", (await generateText(asked)).text);
let text = "";
for await (const piece of streamText(asked).textStream) text += piece;
tell("streamText", text);
const tools = { weather: tool({ description: "The weather in a city.", inputSchema: jsonSchema(PARAMETERS) }) };
const form = { ...asked, maxOutputTokens: FORM_TOKENS };
const called = await generateText({ ...form, prompt: ASKS_WEATHER, tools, toolChoice: "required" });
tellCall("tool call", called.toolCalls[0].toolName, called.toolCalls[0].input);
const streamed = streamText({ ...form, prompt: ASKS_WEATHER, tools, toolChoice: "required" });
const [call] = await streamed.toolCalls;
tellCall("streamed tool call", call.toolName, call.input);
const schema = jsonSchema(PARAMETERS);
tell("a schema", JSON.stringify((await generateText({ ...form, output: Output.object({ schema }) })).output), true);
