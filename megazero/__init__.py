"""Trains large language models on clusters whose nodes are joined by slow links."""

import os

# An installed megazero holds its kernels; in a checkout, which must work uninstalled, they lie beside this folder.
if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    __path__.append(os.path.dirname(__path__[0]))
