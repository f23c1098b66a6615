"""The pages that rung serves on loopback. Their TypeScript is in page/; what is built from it, in static/."""
