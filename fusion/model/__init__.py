"""Networks: convolutions and fusion sites, the choice among them; named arrays; the build folder and running it."""
