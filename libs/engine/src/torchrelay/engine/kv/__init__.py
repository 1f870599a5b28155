"""KV tensors, their wire layouts, import and export. The layouts import no torch."""
