"""What trains the clients of a simulation."""
