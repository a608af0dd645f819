"""Between tokens and text: prompts in a model's chat template, end tokens, and text that grows with its tokens.

It asks of a tokenizer what transformers' tokenizers offer. It knows neither models nor caches, and imports no jax.
"""
