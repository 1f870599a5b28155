"""How many instances of each model, and in which slots."""
