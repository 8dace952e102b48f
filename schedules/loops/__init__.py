"""Loop nests in TIR that templates are made of, and the knobs they share."""
