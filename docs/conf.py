"""Configuration of Sphinx. ``make docs`` builds the site, into build-docs/html.

The package is imported from the folder ``python`` with the libraries that ``make build`` has put there. A GPU is not
needed.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
sys.path[:0] = [str(DOCS / "_ext"), str(REPOSITORY / "python")]

project = "shoestring"
author = "the shoestring authors"
copyright = author
_header = (REPOSITORY / "csrc/include/shoestring/core/version.h").read_text()
_version = re.search(r'SHOESTRING_VERSION "(.+)"', _header)
assert _version is not None
version = release = _version[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "breathe",
    "generated_pages",
    "python_reference",
    "cpp_reference",
]
exclude_patterns = ["_build"]
nitpicky = True

# ---- Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# ---- Python: docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# ---- C++: Doxygen's XML, which the extension cpp_reference makes
breathe_default_project = "shoestring"
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False
cpp_maximum_signature_line_length = 88

# ---- HTML
html_theme = "furo"
html_title = "shoestring"
html_static_path = ["_static"]
html_css_files = ["shoestring.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "github-dark"

# Names of other projects have no inventory here, since the build reads nothing from the network.
# The names of the standard library are those that appear in signatures.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|transformers|numpy|np|collections|contextlib|typing|typing_extensions|pathlib|os)(\..*)?",
    ),
    (r"cpp:identifier", r"(at|c10|c10d|torch|std)(::.*)?"),
    # Namespaces have no declaration in the reference, and `detail` is internal.
    (
        r"cpp:identifier",
        r"shoestring(::(callbacks|data|distributed|lora|nn|optim))?|callbacks|data|distributed|lora|nn|optim",
    ),
    (r"cpp:identifier", r"(shoestring::)?(\w+::)?detail(::.*)?"),
]
nitpick_ignore = [
    *[("py:class", name) for name in ("Tensor", "nn.Module", "optional", "TypeVar")],
    ("py:class", "shoestring.runs.monitor.Batch"),  # a type variable
    *[("cpp:identifier", f"{kind}_t") for kind in ("int64", "int32", "uint8", "uint64", "size")],
    # Types that a class inherits from LibTorch's classes, and from template parameters.
    *[("cpp:identifier", name) for name in ("LossClosure", "OptimizerOptions", "Options", "Shapes")],
]
