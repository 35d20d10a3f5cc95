"""Programs to copy from; each runs as it stands."""
