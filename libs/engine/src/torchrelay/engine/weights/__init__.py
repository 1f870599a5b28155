"""A pack's bytes as tensors: gate per segment, copy to a device, reordering for oneDNN. May import kernels, buffers,
profile, core, modelspec, transfer.manifest.
"""
