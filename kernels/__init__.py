"""The operations of the built-in engine, a folder each; imported as `appliance_kernels.<op>.reference`.

`reference.py` is plain torch and the definition of the operation. Torch only; nothing of the appliance.
"""
