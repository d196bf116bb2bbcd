"""The engine as a child process: its start, its loop, the frames on its socket.

`python -m quire_engine.process FD PARENT_PID`.
"""
