"""What ranks must agree on."""
