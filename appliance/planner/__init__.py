"""The VRAM budget: facts, the chain of terms from the card to the context, the choice, the ladder. Pure; files are read in model_files.

Every GiB of the card has a name. The modules, from the ground up:

* facts: `model_files` (reads), `model_config`, `layer_kinds`, `weights`, `gpus`
* terms: `elements` (bytes a number), `chain` (shared terms), `activation` (what must fit into the headroom)
* one file an engine: `sglang`, `vllm` (+ `vllm_blocks`), `llamacpp`, `native`; `engines` is the table of them
* decisions: `choose` (fraction and context), `ways_out` (of a refusal), `ladder` (safer rungs a cause)
* what was measured: `startup_log`, `compare`, `calibration`, `proof`

All sizes are bytes of one rank (one card) unless a name says otherwise.
"""
