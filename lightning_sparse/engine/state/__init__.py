"""State of an engine: versions within a step, its schema, merging over ranks, and files."""
