"""The engine that trains all clients of a round as one stack of models."""
