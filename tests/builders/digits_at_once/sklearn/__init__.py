"""What the example scripts take from scikit-learn: its own import takes each of twenty ranks 1.6 s."""
