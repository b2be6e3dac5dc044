"""What the exchange does, into any Lightning logger: one mixin, and one thin class per Lightning package."""
