"""From a run folder to what people look at."""
