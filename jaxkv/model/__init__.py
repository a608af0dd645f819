"""The decoder: layers, attention over whole sequences or through pages, and the one way through the model that everything takes.

It is driven by `ModelConfig` alone. It knows no model family, no file format and no scheduler.
"""
