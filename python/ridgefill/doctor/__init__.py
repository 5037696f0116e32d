"""What is wrong with a server, a log, or a file of maps: `ridgefill doctor` (docs/DOCTOR.md).

`server.diagnose(url)`, `log.diagnose(path)` and `files.diagnose(sidecar, model)` each return a `report.Report`.
"""
