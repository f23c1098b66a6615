"""What changed between runs, whether that was one change, and what it means. Reads the record alone; imports no torch.

factors says what differs, code how the source differs, align what happened, judge what may be concluded; page writes
it down, and scaling does so for a sweep.
"""
