def check_refusals(): pass
