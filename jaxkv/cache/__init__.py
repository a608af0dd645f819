"""The paged key/value cache: pages on the device, block tables, the free list, and `PagedKVCache`, which owns all three.

Its operations are pure and vectorised over rows. It knows models only by their `ModelConfig`, and neither requests nor prompts.
"""
