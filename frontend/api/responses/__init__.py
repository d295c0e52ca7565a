"""`POST /v1/responses`, OpenAI's, and stored responses."""
