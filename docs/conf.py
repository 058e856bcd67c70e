"""How `make docs` builds these pages: sphinx, with MyST for Markdown and the furo theme."""

project = "burnish"
author = "the authors of burnish"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "burnish"
html_show_sphinx = False
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]
