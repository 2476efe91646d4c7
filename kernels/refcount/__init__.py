"""Who holds a KV block, and what may be done with it: one word a block."""
