"""Loop nests in TIR used by templates, and the candidates for tiles and tasks."""
