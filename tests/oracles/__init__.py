"""Recorded numbers of public implementations against ours.

The folder of recordings is named by the environment variable KVFOUNDRY_ORACLES, else it is `../shared/oracles` beside
the repository. Nothing here knows a case by heart: cases, shapes and parameters are read from each `case.json`.
"""
