-- Has wrk end with one line for programs: requests, microseconds, the 99th per cent of latencies in microseconds, and errors:
-- of connecting, reading, writing, waiting too long, and answers of another status than 2xx and 3xx.
done = function(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format("numbers %d %d %d %d %d %d %d %d\n", summary.requests, summary.duration, latency:percentile(99),
        errors.connect, errors.read, errors.write, errors.timeout, errors.status))
end
