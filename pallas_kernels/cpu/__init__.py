"""The operations of this package for CPUs, in C++ behind `jax.ffi`.

`library` finds the shared library, says why it cannot be used where that is so, and calls its handlers; `build` makes it in a checkout;
`src` holds the handlers and, compiled once for every kind of processor, the kernels. Importing this registers nothing and loads nothing:
that happens where a program is lowered for a CPU. It does not know which operation is best where: the operations beside this folder do.
"""
