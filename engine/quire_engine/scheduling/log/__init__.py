"""The log of steps and of requests' lives: it records the scheduler's decisions and takes none."""
