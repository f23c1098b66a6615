"""Says why a run is sick, from what it recorded (rules/), or before it starts (preflight/). Rules import no torch."""
