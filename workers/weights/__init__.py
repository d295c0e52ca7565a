"""From files on disk to the weights of one rank."""
