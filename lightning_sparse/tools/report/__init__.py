"""Logs of one or several runs as one page with figures: see :func:`~lightning_sparse.tools.report.page.write_page`."""
