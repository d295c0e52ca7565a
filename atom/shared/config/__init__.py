"""Every setting, a file a concern: a field and its docstring are the flag, the variable and the docs."""
