"""Looks at a run before its first step. Each check is a function of a CheckContext; `checks.py` lists them in order."""
