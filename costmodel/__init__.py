"""What operators cost on a machine: records of operators and machines, models of CPUs, GPUs and collectives."""
