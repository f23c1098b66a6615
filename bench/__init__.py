"""Named benchmarks: each measures rung and a peer in one run, side by side, and prints their ratio. See README.md."""
