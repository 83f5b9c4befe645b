"""The replies of a round: checked, taken in, and kept or summed."""
