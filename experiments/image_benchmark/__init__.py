"""The page on methods on images, written from the records of comparisons."""
