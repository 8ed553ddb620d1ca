"""What a run says about itself: tables and the run summary."""
