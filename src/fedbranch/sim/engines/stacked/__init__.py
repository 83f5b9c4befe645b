"""All clients of a round as one stack of models, which step together."""
