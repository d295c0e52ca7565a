"""Process groups, collectives, peer memory and expert dispatch. Knows no model."""
