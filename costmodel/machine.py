"""Machines: the records, and how to load them. This is the module that others import."""

from costmodel.machine_catalog import host_machine, load_machine, machine_files, user_directory
from costmodel.machine_file import machine_record, read_machine, write_machine
from costmodel.machine_records import (
    ComputeRate,
    GpuChip,
    Host,
    Link,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
    VectorUnit,
)

__all__ = [
    "ComputeRate",
    "GpuChip",
    "Host",
    "Link",
    "Machine",
    "MemoryLevel",
    "ParallelRegion",
    "PerThreads",
    "VectorUnit",
    "host_machine",
    "load_machine",
    "machine_files",
    "machine_record",
    "read_machine",
    "user_directory",
    "write_machine",
]
