"""The text of an answer divided into reasoning, content and calls of tools, as it arrives; used by all dialects."""
