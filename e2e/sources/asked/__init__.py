"""What is asked of ``predict``: the request, and the table that says which option each source takes."""
