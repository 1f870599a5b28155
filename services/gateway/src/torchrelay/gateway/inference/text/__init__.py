"""Text in and out: prompt encoding, the files and decoders of models, detokenization."""
