"""Who may import whom, and what nobody may call: the rules that keep the halves apart, read from the source."""

from __future__ import annotations

import ast
import sys

from architecture.source import PACKAGES, imports, is_folder, modules, of, reachable, text, tree, within

# Third-party packages and the folders, or the one file, in which they may be imported.
ONLY_IN = {
    "fastapi": ("quire_server",),
    "python_multipart": ("quire_server.http.upload",),
    "starlette": ("quire_server",),
    "uvicorn": ("quire_server.http",),
    "uvloop": ("quire_server.http",),
    "httptools": ("quire_bench",),
    "huggingface_hub": ("quire_server.checkpoint.hub",),
    "rich": ("quire_bench", "quire_lab", "quire_server.commands", "quire_server.showing", "quire.progress"),
    "shtab": ("quire_server.commands.completion",),
    "matplotlib": ("quire_bench",),
    "anyio": ("quire_server",),
    "pydantic": ("quire_server",),
    "pydantic_core": ("quire_server",),
    "pydantic_settings": ("quire_server.settings",),
    "yaml": ("quire_server.settings.sources",),
    "prometheus_client": ("quire_server.metrics",),
    "tokenizers": ("quire_server.text",),
    "transformers": ("quire_engine.tools", "quire_engine.execution.models.fallback"),
    "jinja2": ("quire_server.text",),
    **dict.fromkeys(("markdown_it", "nh3", "pygments"), ("quire_server.text.markdown_worker",)),
    "msgspec": ("quire_server", "quire_bench", "quire_lab", "quire_engine.process"),
    "torch": (
        *("quire_engine.execution", "quire_engine.tools", "quire_engine.build", "quire_engine.build_rank"),
        *("quire_engine.links.kv_lending", "quire_engine.links.kv_transfer"),
        *("quire_engine.links.memory_agents", "quire_engine.links.memory_link"),
        *("quire_kernels", "quire_lab.tools"),
    ),
    "safetensors": ("quire_engine.execution",),
    "triton": ("quire_kernels",),
    "flash_attn": ("quire_kernels.flash",),
    "flash_attn_interface": ("quire_kernels.flash",),
    "fa3_fwd_interface": ("quire_kernels.flash",),
    "numpy": (
        "quire_engine.execution.constrained",
        "quire_server.text.matrices",
        *("quire_engine.contract.decodes", "quire_engine.scheduling"),  # the columns of decodes
    ),
    "opentelemetry": ("quire_server.logs.tracing", "quire_server.logs.otlp_metrics"),
    "llguidance": ("quire_engine.execution.constrained", "quire_server.text.grammar_worker"),
    "typing_extensions": ("quire_server",),
    "compression": ("quire_server.http.content_coding",),  # the standard library's from Python 3.14 on
    "backports": ("quire_server.http.content_coding",),
    "nixl": ("quire_engine.links.memory_agents",),
    "mooncake": ("quire_engine.links.memory_agents",),
    "zmq": ("quire_server.engine.kv_events.publisher",),
    "ray": (),  # the control plane of a cluster imports Quire's processes, never the other way round: deploy/
}
# What a folder may import of its own package beside itself: folders, and single files by their dotted names; "*" stands
# for the files at the top of the package.
FOLDERS = {
    "quire_engine.contract": set(),
    "quire_engine.scheduling": {"contract"},
    "quire_engine.routing": {"contract", "cost_model"},
    "quire_engine.execution": {"*", "contract"},
    "quire_engine.links": {"contract", "execution.kv.pool_rows", "own_pauses", "plain_files"},
    "quire_engine.process": {"*", "contract", "tools.prover.ahead"},
    "quire_engine.tools": {"*", "contract", "execution", "demo"},
    "quire_engine.demo": set(),
    "quire_server.dialects": {"errors", "state", "answering", "text", "http", "engine", "metrics", "showing.version"},
    "quire_server.batches": {"background"},
    "quire_server.text": {"errors", "settings"},
    "quire_server.logs": {"metrics", "http", "showing.version"},
    "quire_server.api_servers": {"*", "engine", "metrics", "http", "settings", "logs"},
    "quire_server.metrics": {"showing.version"},
    "quire_server.settings": set(),
    "quire_server.checkpoint": {"settings"},
    "quire_server.engine": {"errors", "metrics", "background", "showing.version"},
    "quire_server.http": {"errors", "settings"},
    "quire_server.answering": {"errors", "state", "text", "engine", "metrics", "http", "showing.version"},
    "quire_server.learning": {"background"},
    "quire_server.routes": {
        "errors",
        "state",
        "batches",
        "learning",
        "dialects",
        "answering",
        "http",
        "metrics",
        "text",
        "showing.version",
    },
    "quire_server.programs": {
        *("*", "answering", "api_servers", "batches", "checkpoint", "engine", "http", "logs", "metrics", "settings"),
        *("showing", "text"),
    },
    "quire_server.showing": set(),
    "quire_server.commands": {
        "*",
        "programs",
        "showing",
        "batches",
        "text",
        "engine",
        "http",
        "settings",
        "checkpoint",
        "logs",
    },
    "quire_lab.simulation": set(),
    "quire_lab.tools": {"simulation"},
    "quire_lab.commands": {"simulation"},
    "quire_lab.facts": {"simulation", "commands"},
    "quire_lab.exercises": {"simulation", "commands", "facts"},
    "quire_lab.mine": {"simulation", "exercises"},
    "quire_lab.studies": {"simulation"},
    "quire_kernels.reference": {"*"},
    "quire_kernels.cpu": {"*", "reference"},
    "quire_kernels.flash": {"*", "reference"},
    "quire_kernels.triton": {"*", "reference", "flash"},
    "quire_kernels.verify": {"*", "reference"},
}
ROUTES = ("quire_server.engine", "quire_server.settings")  # over replicas
# What the laboratory may import of the other packages: their public faces, never what serves.
LAB_IMPORTS = (
    *("quire_bench", "quire_engine.contract", "quire_engine.scheduling", "quire_engine.routing", "quire_engine.tools"),
    *("quire_engine.build", "quire_engine.engine", "quire_engine.demo", "quire_engine.cost_model", "quire_engine.gguf"),
    *("quire_engine.memory_plan", "quire_engine.ranks", "quire_engine.own_modules"),
    *("quire_server.checkpoint", "quire_server.showing", "quire_server.settings", "quire_server.flags"),
    *("quire_server.engine.json_child", "quire_server.http.event_loop", "quire_server.commands.health"),
)
LAB_IS_NAMED = {"quire_server.commands"}  # in its table of commands, and nowhere else
# The files whose ids, counts and hashes only the two halves of the allocator touch.
BLOCKS = ("quire_engine.scheduling.block_pool", "quire_engine.scheduling.prefix_cache")
ALLOCATOR = ("quire_engine.scheduling.cached_blocks", "quire_engine.scheduling.kv_allocator")
TRUST = "quire_kernels.trusted_folder"  # standard library only; whoever keeps files between runs asks it
TOPOLOGY = "quire_kernels.cpu.topology"  # standard library only; whoever counts or places workers asks it
READS_ENVIRONMENT = {
    "quire_server.settings.sources",
    "quire_engine.own_modules",  # PYTHONPATH is no setting of ours
    "quire_engine.execution.prover_process",  # which hands all of it on to a child
}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "base", "impl", "common_utils", "misc"}


def part(name: str) -> str:
    """`quire_engine.scheduling.policies` -> `scheduling`; the package itself -> the empty string."""
    return ".".join(name.split(".")[1:2])


def test_the_rules_see_the_source():
    assert len(modules()) > 60
    assert "quire_engine.contract.types" in imports("quire_engine.scheduling.scheduler")
    assert "torch" in reachable("quire_engine.execution.runner")
    folders = {name for name in modules() if name.count(".") == 1 and is_folder(name)}
    assert folders == set(FOLDERS), "every folder at the top of a package has its rule"


def test_packages_point_one_way():
    for module in of("quire_kernels"):
        assert not any(within(name, ("quire_engine", "quire_server")) for name in imports(module)), module
    for module in of("quire_engine"):
        assert not any(within(name, ("quire_server",)) for name in imports(module)), module
    for module in [*of("quire_server"), *of("quire_bench")]:
        assert not any(within(name, ("quire_kernels",)) for name in imports(module)), module
    for module in of("quire_server"):
        assert not any(within(name, ("quire_bench", "quire")) for name in imports(module)), module
    for module in of("quire"):
        assert not any(within(name, ("quire_kernels", "quire_bench")) for name in imports(module)), module
    for module in [*of("quire_kernels"), *of("quire_engine"), *of("quire_bench"), *of("quire_lab")]:
        assert not any(within(name, ("quire",)) for name in imports(module)), module


def test_nobody_imports_the_laboratory():
    """Not even by its name as a string, except for the table of commands: without its folder the others go on."""
    outside = [module for module in modules() if not within(module, ("quire_lab",))]
    assert {module for module in outside if "quire_lab" in text(module)} == LAB_IS_NAMED
    assert not any(within(name, ("quire_lab",)) for module in outside for name in imports(module))


def test_the_laboratory_sees_public_faces():
    foreign = {
        f"{module} imports {name}"
        for module in of("quire_lab")
        for name in imports(module)
        if within(name, tuple(PACKAGES)) and not within(name, ("quire_lab", *LAB_IMPORTS))
    }
    assert not foreign


def test_third_party_packages_stay_where_they_belong():
    for module in modules():
        for name in imports(module):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            assert top in ONLY_IN, f"{module} imports {name}, which no rule knows"
            assert within(module, ONLY_IN[top]), f"{module} imports {name}"


def test_folders_import_what_they_may():
    for folder, allowed in FOLDERS.items():
        package = folder.split(".")[0]
        for module in of(folder):
            for name in imports(module):
                if not within(name, (package,)) or within(name, (folder,)):
                    continue
                at_top = name in modules() and not is_folder(name) and name.count(".") == 1
                is_allowed = part(name) in allowed or name.removeprefix(f"{package}.") in allowed
                assert is_allowed or (at_top and "*" in allowed), f"{module} imports {name}"


def test_the_neutral_request_knows_neither_side():
    assert not {name for name in imports("quire_server.answering.options") if within(name, tuple(PACKAGES))}


def test_torch_is_not_loaded_where_it_is_not_needed():
    """Directly or through others: the server starts without it, the scheduler is tested without it."""
    for module in modules():
        if not within(module, ONLY_IN["torch"]):
            assert "torch" not in {name.split(".")[0] for name in reachable(module)}, module


def test_what_is_optional_is_loaded_by_no_plain_server():
    """Nor by a node. What a flag asks for is imported by its name, when the flag is there."""
    for program in (
        "quire_server.programs.launch",
        "quire_server.programs.serving",
        "quire_server.programs.node_launch",
        "quire_engine.process",
    ):
        loaded = {name.split(".")[0] for name in reachable(program)}
        assert not loaded & {"zmq", "ray", "opentelemetry", "nixl", "mooncake"}, program


def test_the_scheduling_half_needs_no_package_but_numpy():
    for module in of("quire_engine"):
        if within(module, ONLY_IN["torch"]) or within(module, ONLY_IN["msgspec"]):
            continue
        names = imports(module) - {TRUST, TOPOLOGY}
        known = {"quire_engine", "numpy"}  # numpy where `ONLY_IN` has it: for the columns of decodes
        foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - known
        assert not foreign, (module, foreign)


def test_the_engine_is_synchronous():
    for module in [*of("quire_engine"), *of("quire_kernels")]:
        assert "asyncio" not in {name.split(".")[0] for name in imports(module)}, module


def test_block_ids_go_through_the_allocator():
    for module in modules():
        assert not imports(module) & set(BLOCKS) or module in ALLOCATOR, module


def test_the_server_sees_the_engines_contract_only():
    """The contract, the files at the top of the package, proofs of identity, frames for the supervisor.

    And the routing module, which a front serves with.
    """
    for module in [*of("quire_server"), *of("quire_bench"), *of("quire")]:
        for name in imports(module):
            if within(name, ("quire_engine.process",)):
                assert within(module, ("quire_server.engine", "quire_server.api_servers")), (
                    f"{module} speaks the engine's frames"
                )
            elif within(name, ("quire_engine.routing",)):
                assert within(module, ROUTES), f"{module} routes"
            elif within(name, ("quire_engine.links.handshake", "quire_engine.links.link_security")):
                links = ("quire_server.engine.nodes", "quire_server.programs", "quire_server.commands.config")
                assert within(module, links), f"{module} proves who it is"
            elif within(name, ("quire_engine",)) and not within(name, ("quire_engine.contract",)):
                assert name.count(".") == 1, f"{module} imports {name}"


def test_statuses_live_in_errors_only():
    """Nobody below the routes raises the framework's own errors."""
    for module in of("quire_server"):
        if module != "quire_server.app":
            froms = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom)]
            assert "HTTPException" not in {alias.name for node in froms for alias in node.names}, module


def test_settings_is_the_only_reader_of_the_environment():
    for module in modules():
        reads = [
            node.lineno
            for node in ast.walk(tree(module))
            if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"})
            or (isinstance(node, ast.alias) and node.name in {"environ", "getenv"})
        ]
        assert not reads or module in READS_ENVIRONMENT, f"{module}:{reads}"


def test_no_global_statement():
    """Module-level state is never reassigned: what changes has an owner."""
    for module in modules():
        assert not [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.Global)], module


def test_every_module_says_what_it_is_for():
    for module, path in modules().items():
        if not tree(module).body:
            continue
        assert ast.get_docstring(tree(module)), f"{module} ({path.name}) has no docstring"


def test_names_say_something():
    for module in modules():
        assert not VAGUE_NAMES & set(module.split(".")), module


def test_the_allocator_alone_writes_what_a_sequence_has_computed():
    """`sequence.kv` is written where blocks are: in the allocator and the one that swaps."""
    allocators = {"quire_engine.scheduling.kv_allocator", "quire_engine.scheduling.swapping"}
    writers = set()
    for module in of("quire_engine"):
        for node in ast.walk(tree(module)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
            if any(".kv." in ast.unparse(target) for target in targets):
                writers.add(module)
    assert writers == allocators
