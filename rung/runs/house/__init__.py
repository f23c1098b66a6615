"""Keeping house: which runs some words mean and who needs them, tags, the trash, moves, and what may be deleted.

    places      which runs some words mean, and how each stands
    needs       why a run should stay: who comes from it, or began with its weights
    tags        words on runs
    trash       removed runs, there and back
    journal     a move that was not finished
    moving      renames experiments and moves runs
    refs        the git refs that hold the code of runs
    clearing    what `rung gc` may delete
    disk        how much disk a run takes

Nothing of this is needed to write or to read a run. Pins are in rung.runs.marks, because the engine reads them.
"""
