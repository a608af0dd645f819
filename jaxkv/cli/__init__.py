"""The command line: `jaxkv generate`, `jaxkv chat`, `jaxkv bench`, `jaxkv inspect`.

It knows arguments, streams and exit statuses: each command is a file that calls the library, writes results to stdout and
everything else to stderr. It decides nothing about decoding: what a command can do, a caller of the library can do, too.
"""
