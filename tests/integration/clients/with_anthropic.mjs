// The anthropic package for Node: create, stream, a refusal.
import Anthropic from "@anthropic-ai/sdk";
import { MAX_TOKENS, MESSAGES, MODEL, tell, URL } from "./asked.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, messages: MESSAGES, max_tokens: MAX_TOKENS, temperature: 0 };

tell("create", (await client.messages.create(asked)).content[0].text);
tell("stream", await client.messages.stream(asked).finalText());
try {
  await client.messages.create({ ...asked, model: "claude-9" });
  throw new Error("a model that does not exist");
} catch (error) {
  if (!(error instanceof Anthropic.NotFoundError)) throw error;
}
