"""`python -m atom.entrypoints.openai_server`: the same program as `atom-launch`."""

from atom.launch import main

if __name__ == "__main__":
    main()
