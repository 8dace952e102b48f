"""What people read of results: the page of a build, pictures, and text on the console."""
