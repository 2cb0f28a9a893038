"""What finished runs say together: effects on speed, what fails under which levels, what was never told apart.

    python -m sweeper.analysis STORE|SWEEP [--json]

Pure functions over plain records: `records` reads them from run directories, `effects`, `failures`, `attribution`
and `confounders` each answer one question, `conclude` puts the answers together, `sentences` and `commands` into words.
"""
