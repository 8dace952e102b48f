"""Built-in models: own definitions of convolutional and recommendation models, transformers by configuration."""
