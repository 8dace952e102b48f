"""A network as the tool sees it: convolutions, sites, plans, named arrays."""
