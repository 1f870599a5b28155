"""OpenAI's letter: request bodies, replies and SSE, logprobs shape, errors, the raw ASGI app of /v1/chat/completions
and /v1/completions. Imports core, inference. (openai.errors imports nothing of the gateway.)
"""
