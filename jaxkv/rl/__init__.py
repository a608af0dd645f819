"""Rollouts and training: log-probabilities of given tokens, and generated tokens as a training batch.

It runs the very decoder that an optimizer trains. It knows no loss, no optimizer and no reward.
"""
