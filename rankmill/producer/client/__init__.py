"""Python clients that submit pairs to workers, and handles of the submitted runs."""
