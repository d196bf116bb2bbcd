"""What all tests share: tests marked `gpu` are reported as skipped where there is no GPU; marks of absent plugins.

SIGINT is as in a terminal, also where the tests run as a background job, which inherits it as ignored, and so would the
processes that they start. One of several processes that run tests computes with one thread in torch: the threads of
all would wait for each other, spinning. Tests of threads set their number themselves. Drawn values are the same in
every run of the same tests, so that a change alone can make them fail; `support.at_length` draws others each time.
HTTP clients share the certificates of the public authorities, which httpx reads anew for each of them, in 27 ms. The
collector of garbage leaves imports and collected tests alone. Must not know: any test. Fixtures live beside the tests
that use them.
"""

import functools
import gc
import os
import signal
import ssl

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded


def pytest_configure(config):
    gc.disable()  # imports and collected tests are no garbage; to look at them over and over is a tenth of all
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("timeout"):  # as on a machine that has a GPU and little else
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout is not installed; nothing ends the test")
    if config.pluginmanager.hasplugin("hypothesispytest"):
        import hypothesis

        hypothesis.settings.register_profile(
            "ours",
            derandomize=not config.pluginmanager.hasplugin("support.at_length"),
            deadline=None,  # a busy machine draws slowly
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
        hypothesis.settings.load_profile("ours")


def shared_contexts(make):
    """`ssl.create_default_context`, but with one context for all callers that ask for the public authorities."""
    kept = functools.cache(make)

    @functools.wraps(make)
    def create(*purpose, cafile=None, **more):
        import certifi

        is_public = cafile is not None and cafile in (certifi.where(), os.environ.get("SSL_CERT_FILE"))
        return (kept if is_public else make)(*purpose, cafile=cafile, **more)

    return create


ssl.create_default_context = shared_contexts(ssl.create_default_context)


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)  # for 700, which one test's app exceeds ten times
    gc.enable()


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # most runs of a few tests do not need it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
