"""Evidence: how far training in 16 bits holds, measured against FP32 on equal weights and data.

    python -m benchmarks.evidence [NAME…] [--night | --full] [--cases CASE,…] [--output FOLDER]

Each experiment is a file. Its settings, seeds and the ground of its verdict are fixed there. Cases that are done are
kept, and a case that was interrupted goes on where its last checkpoint was.
"""
