"""One module an engine, each with `train(run, meter)`: run every step of the workload."""
