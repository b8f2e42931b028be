"""``undo.interrupts``: Ctrl-C and other signals wait until the other ranks no longer do."""

import signal
import threading

import pytest

from autobatch.undo.interrupts import deferred_interrupts

pytestmark = pytest.mark.quick


def test_an_interrupt_is_raised_at_the_end_of_the_block():
    """All of it has run, and the handler is back."""
    handler, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("name", ["SIGTERM", "SIGCHLD", "SIGALRM", "SIGUSR1"])
def test_a_handler_of_another_signal_waits_too(name):
    """As of a DataLoader, which raises when a worker was killed; with Ctrl-C both come, and nothing is left set."""
    number, done = getattr(signal, name), []

    def raise_mine(number, _):
        raise RuntimeError(f"came {number}")

    before = signal.signal(number, raise_mine)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(RuntimeError, match=f"^came {int(number)}$"), deferred_interrupts(), deferred_interrupts():
            signal.raise_signal(number)
            done.append("the rest")
        assert done == ["the rest"]
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(number)
        assert (signal.getsignal(number), signal.getsignal(signal.SIGINT)) == (raise_mine, handler)
    finally:
        signal.signal(number, before)


def test_without_an_interrupt_nothing_happens():
    """An error of the block comes out."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), deferred_interrupts():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_that_is_ignored_stays_so():
    """A program without a handler has nothing to hold back."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_get_none():
    """Only the main thread may set a handler."""
    handlers = []

    def work():
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
