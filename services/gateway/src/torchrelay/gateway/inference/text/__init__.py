"""prompt side and output side of text: chat templates and their process, tokenizer cache, prompt encoding,
detokenization, token bytes. Imports core, inference.core, clients, executor.
"""
