"""Few compiled programs: the ladder of sizes that shapes are rounded up to, so that one program serves many calls.

A program is compiled for its shapes, and compiling takes seconds where running takes milliseconds. Outside a caller's jit jaxkv therefore
rounds every size up to a rung of one ladder and hands the true size over as data. Nothing here knows models, caches or tokens.
"""
