"""Reading of files that users name, and atomic writing of results."""
