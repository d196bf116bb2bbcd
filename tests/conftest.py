"""What all tests share: tests marked `gpu` are reported as skipped where there is no GPU; marks of absent plugins.

SIGINT is as in a terminal, also where the tests run as a background job, which inherits it as ignored, and so would the
processes that they start. Must not know: any test. Fixtures live beside the tests that use them.
"""

import signal

import pytest


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("timeout"):  # as on a machine that has a GPU and little else
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout is not installed; nothing ends the test")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # most runs of a few tests do not need it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
