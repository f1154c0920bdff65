"""The job doctor: what is wrong with a job, why, how sure that is, and what to do (StreamOps 5.3)."""
