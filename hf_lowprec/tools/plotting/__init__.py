"""`hf-lowprec plot`: what training runs have logged, as a picture and as a page. Nothing here imports torch."""
