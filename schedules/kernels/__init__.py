"""One file per kernel template, and the table of them."""
