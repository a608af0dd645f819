"""Decoding: steps of the model through a cache, sampling, continuous batching on the device, beams and speculation.

Everything here can stand inside a caller's `jax.jit`. It knows neither files nor texts: tokens go in and tokens come out.
"""
