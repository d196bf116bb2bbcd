"""Settings of a server: their fields, the syntax of their values, and their sources.

Promises: this module exports all that other folders need. Must not know: torch, HTTP.
"""

from quire_server.settings.engine_fields import DEMO_MODEL
from quire_server.settings.experiments import EXPERIMENTS, given_as, spelled
from quire_server.settings.fields import GROUPS, Settings, load_settings, plain_fields, settings_and_problems
from quire_server.settings.limits import REMOVED, ServerLimits, removed_line
from quire_server.settings.models_file import ModelEntry, several_models
from quire_server.settings.sources import ENV_PREFIX, SettingsError, flag_name, suggest

__all__ = [
    "DEMO_MODEL",
    "ENV_PREFIX",
    "EXPERIMENTS",
    "GROUPS",
    "REMOVED",
    "ModelEntry",
    "ServerLimits",
    "Settings",
    "SettingsError",
    "flag_name",
    "given_as",
    "load_settings",
    "plain_fields",
    "removed_line",
    "settings_and_problems",
    "several_models",
    "spelled",
    "suggest",
]
