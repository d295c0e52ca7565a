"""Arguments, reports and engines that several benchmarks share."""
