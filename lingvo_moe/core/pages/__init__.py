"""Tables, templates and drawings of self-contained HTML pages, of Markdown and of reports in terminals."""
