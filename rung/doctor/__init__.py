"""Says why a run is sick: rules over what was recorded, and probes of what was not. Rules import no torch."""
