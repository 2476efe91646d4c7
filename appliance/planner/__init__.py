"""The VRAM budget: facts, the chain of terms from the card to the context, the choice, the ladder. Pure; files are read in model_files.

Every GiB of the card has a name. The modules, from the ground up:

* facts: `model_files` and `gguf` (read), `model_config`, `layer_kinds`, `weights`, `quantisation`, `gpus`, `catalogue` (known names)
* terms: `elements` (bytes a number), `chain` (shared terms), `activation` (what must fit into the headroom)
* one file an engine: `sglang`, `vllm` (+ `vllm_blocks`), `llamacpp`, `native`; `engines` is the table of them
* decisions: `checks`, `choose` (fraction and context), `ways_out` (of a refusal), `moves` and `ladder` (safer rungs a cause)
* what was measured: `startup_log` (+ `log_patterns`), `compare`, `calibration`, `proof`
* pictures: `draw`, `draw_svg`

All sizes are bytes of one rank (one card) unless a name says otherwise.
"""
