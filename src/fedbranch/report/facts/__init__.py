"""Run folders as one JSON object: all that page, terminal and files show."""
