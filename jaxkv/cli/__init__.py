"""The command line: `jaxkv generate`, `jaxkv bench`, `jaxkv inspect`.

Each command is a file that reads arguments, calls the library and writes results to stdout, everything else to stderr.
It decides nothing about decoding: what a command can do, a caller of the library can do, too.
"""
