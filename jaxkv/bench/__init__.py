"""Measurements, each runnable on its own.

jaxkv bench compare                         side by side with other engines, and with what the machine allows
jaxkv bench decode                          prefill and decode speed, next to the memory-bandwidth limit
python -m jaxkv.bench.against_transformers  decode next to transformers on torch, same weights and threads
python -m jaxkv.bench.continuous_batching   rows refilled as they end next to static batches
python -m jaxkv.bench.flat                  time per step with a larger pool, wider tables, more waiting prompts
python -m jaxkv.bench.start_up              import, load and compilation, with and without the compilation cache
"""
