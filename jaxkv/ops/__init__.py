"""Products, row tiles, and the one value that says how numbers are computed.

Everything here works on flat rows of activations and plain weights. It knows neither layers, nor attention, nor the cache.
"""
