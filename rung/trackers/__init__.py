"""Other trackers: a run can be mirrored to them while it trains, and their histories can be imported.

The record stays the truth: a mirror is fed from it, may lose rows, may fail, and never stops or slows a run.
"""
