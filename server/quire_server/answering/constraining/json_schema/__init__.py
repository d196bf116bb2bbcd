"""JSON schemas as grammars of the JSON texts of their values.

Promises: what a grammar accepts is valid under its schema; each value that the schema allows can be written, in the
spellings that docs/api.md lists; a schema that cannot be held is a SchemaRefused that names keyword and place. One
door: `grammar`, or `JsonRules` for several schemas; its neighbours share `FORMATS`, `PLAIN_INTEGERS` and `resolved`,
which follows a reference.
"""

from quire_server.answering.constraining.json_schema.formats import FORMATS
from quire_server.answering.constraining.json_schema.reading import PLAIN_INTEGERS, resolved
from quire_server.answering.constraining.json_schema.shapes import SchemaRefused
from quire_server.answering.constraining.json_schema.writing import JsonRules, grammar

__all__ = ["FORMATS", "PLAIN_INTEGERS", "JsonRules", "SchemaRefused", "grammar", "resolved"]
