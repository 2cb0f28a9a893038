"""The subcommands of `python -m dflash`, a module each: what it can be told, and the call that does it.

A module's docstring is its help; `arguments(parser)` adds its arguments; `OPTIONS`, if it is there, says which of
them sets which setting; `run(arguments)` does the work and gives the exit status. None of them loads torch before
`run`, so help and wrong settings are told at once.
"""
