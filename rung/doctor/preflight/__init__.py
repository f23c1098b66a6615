"""Looks at a run before its first step. Each check is a function of a Bench; `checks.py` lists them in order."""
