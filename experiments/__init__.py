"""The paper's figures on real data, and the comparisons it lacks. One module for each."""
