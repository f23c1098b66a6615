"""What people do to runs once they are recorded: find, tag, move, remove and clean up.

Nothing of this is needed to write or to read a run. Pins are in rung.runs.marks, because the engine reads them.
"""
