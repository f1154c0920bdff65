"""The routes of the API, a file per noun: paths, bodies and replies."""
