"""The engine's HTTP surface: OpenAI's chat and completions, SGLang's /generate, health and metrics.

A request's path: app (routes) → exchange (body, client, drain) → chat | completions | generate (what the body means)
→ generation (tokens to text, stop strings) → the same three (how the answer looks) → exchange (bytes out).
No torch is imported here: /health answers while the model still loads.
"""
