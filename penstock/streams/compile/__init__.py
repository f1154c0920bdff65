"""From a pipeline to jobs: graph, schemas, expressions, optimizer, cutting, packages."""
