"""The Relax pass ``FuseConvPairs`` for other people's pipelines (docs/relax-pass.md)."""
