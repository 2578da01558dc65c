"""Audits: a copy of the process repeats captured steps in eager.

- :mod:`.step_audit`: when a step is audited, and what is wrong with it
- :mod:`.snapshot`: what a step computed and left behind, compared
- :mod:`.forked_copy`: the copy of the process
"""
