"""Control policies: what is wrong with a job, why, and what to do about it (StreamOps 4 and 5)."""
