"""A Flower app: handwritten digits whose labels mean different things to different clients."""
