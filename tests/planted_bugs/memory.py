"""Only an OOM is an OOM, and a budget holds what it says."""

from __future__ import annotations

from planted_bugs import bug

CPU = "tests/memory/test_cpu.py"
OOM = "tests/memory/test_oom.py"


@bug("autobatch.memory.oom._means_oom", f"{OOM}::test_anything_else_is_no_oom")
def any_mention_of_memory_is_an_oom(real, error):
    """A bug whose message mentions memory is retried until one sample fails."""
    return real(error) or "memory" in str(error).lower()


@bug("autobatch.memory.oom._is_fatal", f"{OOM}::test_after_what_is_fatal_an_oom_is_none")
def a_lost_device_is_retried(real, error):
    """A step is run again after an error that has ended the CUDA context."""
    return False


@bug("autobatch.memory.oom._unchain", f"{OOM}::test_an_oom_that_was_being_handled_before_does_not_count")
def an_error_in_a_handler_is_an_oom(real, error, handled):
    """An error raised while the caller handles an OOM counts as another one."""
    return real(error, None)


@bug("autobatch.memory.cpu.LiveStorage._subtract_dead", f"{CPU}::test_usage_follows_what_is_made_and_freed")
def freed_memory_counts(real, self):
    """A CPU budget is used up by tensors that are long gone."""
    self._dead.clear()


@bug("autobatch.memory.cpu.StorageBudget.__torch_dispatch__", f"{CPU}::test_the_inner_of_two_limits_holds_inside")
def a_cpu_budget_is_not_enforced(real, self, func, types, *arguments):
    """A step on a CPU passes its budget."""
    args, kwargs = (*arguments, {})[:2]
    return func(*args, **(kwargs or {}))
