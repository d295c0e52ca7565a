"""The running batch on the device: rows, block tables, the shape of a step."""
