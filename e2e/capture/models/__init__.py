"""Built-in models: own definitions of the convolutional and recommendation models, transformers by configuration."""
