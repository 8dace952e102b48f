"""Loop nests in TIR that templates are made of, and the tiles and tasks they choose from."""
