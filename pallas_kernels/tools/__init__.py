"""What a developer asks of the kernels: compile reports without a GPU, their traffic in bytes, a bench, and a check on a GPU.

Each is a program (`python -m pallas_kernels.tools.bench`). They are no part of the installed package, and the kernels do not know them.
"""
