"""Hidden models in a federation: the mod on the nodes, and how nodes agree on the secret."""
