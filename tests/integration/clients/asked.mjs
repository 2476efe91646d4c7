// What the programs beside this one are asked, and how they tell their caller: asked.py for Node.
const [url, model, prompt, most] = process.argv.slice(2);
export const URL = url, BASE = `${url}/v1`, MODEL = model, PROMPT = prompt, MAX_TOKENS = Number(most);
// For a call or a form, however much white space a small model puts into it.
export const FORM_TOKENS = 100;
export const MESSAGES = [{ role: "user", content: PROMPT }];
export const ASKS_WEATHER = "What is the weather in Oslo?";
export const PARAMETERS = { type: "object", properties: { city: { type: "string", enum: ["Oslo", "Bergen"] } }, required: ["city"] };

// own: the client asked in words of its own, so that its text is that of no plain request.
export function tell(how, text, own = false) {
  console.log(JSON.stringify({ how, text, own }));
}

export function tellCall(how, name, values) {
  if (name !== "weather" || !["Oslo", "Bergen"].includes(values.city)) throw new Error(`${name} ${JSON.stringify(values)}`);
  tell(how, JSON.stringify(values), true);
}
