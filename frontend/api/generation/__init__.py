"""What all generating endpoints share: from a parsed request to its stream of outputs."""
