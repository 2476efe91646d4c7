"""The next token from its logits."""
