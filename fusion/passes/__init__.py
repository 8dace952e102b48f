"""The Relax pass for other people's pipelines."""
