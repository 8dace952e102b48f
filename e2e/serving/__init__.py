"""Language models as they are served: sequences, the cache, a scheduler, and the price of a step."""
