"""Why many ranks end behind dense training: parts of the rule for AdamW are switched off, one at a time."""
