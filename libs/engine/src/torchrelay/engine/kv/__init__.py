"""The KV tensors, how KV and part-done prefills are laid out on the wire, their import and export. May import
batching, buffers, kernels.cpu.threads, profile, core. layout, prefill_layout, model_layouts stay torch-free
(contract by module).
"""
