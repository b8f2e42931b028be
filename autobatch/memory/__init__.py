"""What memory there is, how it is measured and limited, and what happens when it ends."""
