"""Measurements for those who develop jaxkv, each runnable from a checkout.

python -m benchmarks.compare                side by side with other engines, and with what the machine allows
python -m benchmarks.against_transformers   decode next to transformers on torch, same weights and threads
python -m benchmarks.continuous_batching    rows refilled as they end next to static batches
python -m benchmarks.growth                 time per step with a larger pool, wider tables, more waiting prompts
python -m benchmarks.start_up               import, load and compilation, with and without the compilation cache

They run from a checkout: the installed package does not contain them, and nothing in it imports them. What users measure on a
machine of their own is `jaxkv bench`, in `jaxkv/bench/`. To add a measurement, begin with `growth.py`, the shortest.
"""
