"""The exact reference and the tolerance by which results are judged."""
