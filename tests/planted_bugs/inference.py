"""map() must return what the function returns for the whole batch."""

from __future__ import annotations

from contextlib import nullcontext

from planted_bugs import bug

FAILURES = "tests/inference/test_failures.py"
MAP = "tests/inference/test_map.py"


@bug("autobatch.inference.piece.PieceRunner._attempt", f"{FAILURES}::test_memory_may_end_at_every_operation")
def samples_of_a_failed_piece_are_lost(real, self, waiting, indices, length):
    """Results of samples at which memory ran out are missing."""
    done, reason = real(self, waiting, indices, length)
    if done is None:
        waiting.drop(len(indices))
    return done, reason


@bug("autobatch.inference.piece.eval_mode", f"{MAP}::test_modules_are_in_eval_mode_meanwhile")
def dropout_is_active(real, modules):
    """map() runs a model with dropout."""
    return nullcontext()


@bug("autobatch.inference.results._write", f"{MAP}::test_a_batch_is_sorted_by_length_too")
def results_are_in_another_order(real, columns, indices, found, *path):
    """Results of samples that were sorted by length belong to other samples."""
    real(columns, sorted(indices), found, *path)


@bug("autobatch.inference.results.Joined.partial", f"{FAILURES}::test_a_bad_item_of_a_batch_is_named")
def results_before_an_error_are_lost(real, self):
    """An error in the last sample loses hours of results."""
