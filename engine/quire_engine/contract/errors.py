"""The engine's exception tree.

QuireError                    everything we raise on purpose; the text is one line, fit for an operator
├── ConfigError               an impossible setting; names the fix
├── ModelLoadError            a checkpoint that cannot be served; names the file
│   └── NotNative             no entry of ours describes it
├── InfeasibleRequest         can never fit the pool or the limits, even alone
├── Unanswerable              a question about the engine's state that has no answer
├── EngineDead                the engine process is gone and will not come back
│   └── CrashLoop             it failed to start as often as the restart policy allows
└── ProtocolError             a frame that does not decode
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(QuireError):
    """A setting that cannot work; the message names the setting and a value that would."""


class ModelLoadError(QuireError):
    """A checkpoint that is missing, malformed or of an unsupported architecture."""


class NotNative(ModelLoadError):
    """A checkpoint that no entry of ours describes; another implementation may serve it."""


class InfeasibleRequest(QuireError):
    """A request that no schedule can serve with this pool and these limits."""


class Unanswerable(QuireError):
    """A question about the engine's state that is unknown or has no answer; the text says which."""


class EngineDead(QuireError):
    """The engine process ended and is not being restarted."""


class CrashLoop(EngineDead):
    """The engine process failed to start as often as the restart policy allows."""


class ProtocolError(QuireError):
    """Bytes on the engine socket that are not a valid frame."""
