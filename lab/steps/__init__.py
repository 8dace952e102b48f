"""Published steps as requests of ``e2e``: training of language models, image models, recorded models."""
