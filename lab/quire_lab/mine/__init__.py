"""A student's own block pool or scheduler: held against invariants, then serving a real model beside ours."""
