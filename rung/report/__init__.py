"""Pages, plots and tables: blocks as Markdown and HTML, curves and points as SVG, tables for the terminal. No torch."""
