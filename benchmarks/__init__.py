"""The benchmark harness: workloads, peers, a real link, a simulated cluster, reports."""
