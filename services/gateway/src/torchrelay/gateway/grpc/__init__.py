"""inference.v1.Inference: servicer (+ converters after the split). Imports core, inference."""
