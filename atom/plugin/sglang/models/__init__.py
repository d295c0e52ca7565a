"""The external model package of SGLang, which imports each of its modules and takes their EntryClass."""
