"""What a user measures on a machine of their own: `jaxkv bench decode`.

Times are medians, and stand beside what the memory's bandwidth allows. Comparisons with other engines are in `benchmarks/`, which is
in a checkout only.
"""
