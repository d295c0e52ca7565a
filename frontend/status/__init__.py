"""What the status page shows, collected and streamed."""
