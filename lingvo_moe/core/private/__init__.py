"""The only modules that use private parts of libraries."""
