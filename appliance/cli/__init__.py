"""`appliancectl`: one file a verb group. It prints; it decides nothing, and loads only what the verb needs."""
