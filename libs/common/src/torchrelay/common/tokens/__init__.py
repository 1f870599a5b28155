"""token ids to text, stop strings, tokenizer loading, prefix hashes. Imports errors only."""
