"""The command ``autobatch``: plan, predict, look, compare, repeat. Each command is a module; ``main`` chooses."""
