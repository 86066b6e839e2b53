"""verl's own trainer, unmodified, on a machine without an accelerator.

verl 0.9.1 ("V1") finds everything here through settings of its own: ``config/spell_backward.yaml``
names the parts, and ``plugin.py`` is the module that verl imports in its processes.
"""
