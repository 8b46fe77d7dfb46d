"""What the site generates from the code: no table on a page is kept by hand where the code already says it."""
