"""Where runs execute: as jobs of Slurm, submitted through submitit (docs/CLUSTER.md).

settings.py   what a user asks of Slurm        slurm.py   what Slurm says of jobs and nodes
submit.py     runs -> jobs                     job.py     one run, on the node that Slurm gave it
watch.py      the command that follows them: what jobs wrote into the store comes first, Slurm is asked second
"""
