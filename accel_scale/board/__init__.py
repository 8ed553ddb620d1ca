"""`accel-scale board`: plans, the doctor and live runs on a local web page."""
