"""burnish: post-training for language models in JAX."""
