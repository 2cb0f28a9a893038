"""DFlash trainer: frozen targets feed hidden states to block-diffusion drafters.

Importing this package, `dflash.events`, `dflash.settings`, `dflash.models` and `dflash.output` loads neither torch nor
transformers, so that a harness can read a job's contract in milliseconds.
"""
