// @langchain/openai: invoke, stream, a tool call.
import { ChatOpenAI } from "@langchain/openai";
import { ASKS_WEATHER, BASE, MAX_TOKENS, MODEL, PARAMETERS, PROMPT, tell, tellCall } from "./asked.mjs";

const chat = new ChatOpenAI({
  model: MODEL, apiKey: "none", temperature: 0, maxTokens: MAX_TOKENS, maxRetries: 0, configuration: { baseURL: BASE },
});

tell("invoke", (await chat.invoke(PROMPT)).content);
let text = "";
for await (const piece of await chat.stream(PROMPT)) text += piece.content;
tell("stream", text);
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters: PARAMETERS } }];
const [call] = (await chat.bindTools(tools, { tool_choice: "required" }).invoke(ASKS_WEATHER)).tool_calls;
tellCall("tool call", call.name, call.args);
