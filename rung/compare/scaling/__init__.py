"""The page of a sweep: how a figure moves with what was varied, within a seed; see page.report."""
