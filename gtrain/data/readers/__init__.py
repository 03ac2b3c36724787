"""Readers of file formats: from a user's files to arrays, with the file and line of what is malformed."""
