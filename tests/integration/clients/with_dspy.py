"""dspy: the model, and a signature that it has to fill in."""

import dspy
from asked import BASE, MAX_TOKENS, MODEL, PROMPT, tell

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE, api_key="none", temperature=0, max_tokens=MAX_TOKENS, cache=False, num_retries=0)
tell("LM", lm(PROMPT)[0])
