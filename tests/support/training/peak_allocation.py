"""The memory that torch's CPU allocator hands out, as torch's profiler records it."""

from collections.abc import Callable

import torch


def peak_allocation(function: Callable[[], object]) -> int:
    """The most bytes on the CPU that `function` holds at once, beyond what was held before.

    Everything that goes through torch's allocator counts: tensors, and the temporaries inside torch's operations.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
