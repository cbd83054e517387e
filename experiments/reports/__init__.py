"""The report on all papers: what was run here, and what the remaining runs would cost."""
