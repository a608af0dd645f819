"""What users measure on a machine of their own: `jaxkv bench decode`.

Times are medians, shown beside the limit that the memory's bandwidth sets. `measure.py` holds timing, memory and bandwidth, `decode.py`
the command. Comparisons with other engines are programs in `benchmarks/`, which is part of a checkout but not of the installed package.
"""
