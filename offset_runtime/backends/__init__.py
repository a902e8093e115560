"""How a base model is run: the `Backend` protocol and its implementations."""
