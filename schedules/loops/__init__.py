"""TIR loop nests for the templates, and their choices of tiles and tasks."""
