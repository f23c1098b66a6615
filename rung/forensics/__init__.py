"""Why a step failed: takes it again, under many conditions, and names the cause."""
