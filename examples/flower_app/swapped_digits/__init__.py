"""A Flower app: handwritten digits with labels that mean different things to different clients."""
