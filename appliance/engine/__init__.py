"""The built-in engine: paged KV cache, chunked prefill, continuous batching. The only importer of torch.

A request's path is the order of the files: server (HTTP) → text (template, tokens) → loop (thread) → scheduler
(block_pool) → runner → models → sampler, and back as TokenOutput.
"""
