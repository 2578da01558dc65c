"""Which way a step runs.

- :mod:`.race`: the state machine that decides it
- :mod:`.ways`: which ways there are, in which order, and what is expected of each
- :mod:`.run_facts`: what is asked of the run, what is to come of it, and what its config says of races
- :mod:`.failures`: what happens when a way cannot go on
- :mod:`.threads`: how many threads the unchanged step runs on
- :mod:`.turn`: the steps between two questions to the race
- :mod:`.view`: what people read of a race
"""
