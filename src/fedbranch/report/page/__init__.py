"""The report as one HTML file, and the same page while a run goes on."""
