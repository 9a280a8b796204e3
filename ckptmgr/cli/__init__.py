"""The command line: one file per family of commands; parse, call, print."""
