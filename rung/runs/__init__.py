"""The lab book's store: a run is a folder, and the folder is the database.

record writes a run, query reads one, metrics holds the rows, provenance says what was run. Nothing here imports torch,
and numpy stays out as well: `rung ls` answers on a machine that has neither.
"""
