"""The build folder, and running what is in it."""
