"""Machines and clusters: their records, their YAML files (in ``cpu``, ``gpu``, ``cluster``, ``network``), the
catalogue.
"""
