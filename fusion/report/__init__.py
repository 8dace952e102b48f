"""Reports for users: HTML page of a build, pictures, and console text."""
