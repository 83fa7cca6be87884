"""The rules by which parts of a model stay in FP32, each a function that takes a `ModuleTree`.

`casting/cast_plan.py` applies them in order and combines what they keep.
"""
