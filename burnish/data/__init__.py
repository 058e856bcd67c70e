"""Prompts: where they come from, which are used, in what order. No jax."""
