"""Tasks on a model, such as its calibration, that run in a process of their own."""
