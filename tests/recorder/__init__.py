"""The commit before beside this one: what every composition does in 20 steps, compared bit for bit."""
