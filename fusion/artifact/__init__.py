"""The build folder that ``tune`` leaves, and running what is in it."""
