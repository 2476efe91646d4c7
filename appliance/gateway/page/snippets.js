// Lines to copy, filled with this box's address and its model's name.

import { byId, copyButton, element } from "./dom.js";

const SNIPPETS = [
  ["curl", (base, model, key) => `curl ${base}/chat/completions -H 'Content-Type: application/json'${key ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : ""} \\\n  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`],
  ["Python (openai)", (base, model, key) => `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${key}")\nanswer = client.chat.completions.create(\n    model="${model}", messages=[{"role": "user", "content": "Hello"}]\n)\nprint(answer.choices[0].message.content)`],
  ["JavaScript (openai)", (base, model, key) => `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${base}", apiKey: "${key}" });\nconst answer = await client.chat.completions.create({\n  model: "${model}",\n  messages: [{ role: "user", content: "Hello" }],\n});\nconsole.log(answer.choices[0].message.content);`],
  ["LiteLLM", (base, model, key) => `model_list:\n  - model_name: ${model}\n    litellm_params:\n      model: openai/${model}\n      api_base: ${base}\n      api_key: "${key}"`],
  ["Open WebUI", (base, _, key) => `docker run -d -p 3000:8080 \\\n  -e OPENAI_API_BASE_URL=${base} \\\n  -e OPENAI_API_KEY=${key} \\\n  ghcr.io/open-webui/open-webui:main`],
  ["Continue", (base, model, key) => `models:\n  - name: ${model}\n    provider: openai\n    model: ${model}\n    apiBase: ${base}\n    apiKey: "${key}"`],
  ["Aider", (base, model, key) => `export OPENAI_API_BASE=${base} OPENAI_API_KEY=${key}\naider --model openai/${model}`],
];

// The key itself never stands here: what is copied is pasted into chats.
export function showSnippets(model, needsKey) {
  const base = new URL("v1", document.baseURI).href;
  const key = needsKey ? "YOUR_KEY" : "none";
  byId("snippets").replaceChildren(
    ...SNIPPETS.map(([name, write]) => {
      const text = write(base, model, name === "curl" ? needsKey : key);
      return element("details", {}, element("summary", {}, name), element("pre", { tabindex: "0", role: "region", "aria-label": name }, element("code", {}, text)), copyButton("Copy", () => text));
    }),
  );
}
