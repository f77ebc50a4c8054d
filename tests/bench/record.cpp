#include "tests/bench/record.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include <boost/json.hpp>

namespace bulkhead::bench {

Bench::Bench(std::string bench_name, std::string what, std::function<Records()> body)
    : name{std::move(bench_name)}, description{std::move(what)}, run{std::move(body)} {
    benches().push_back(this);
}

std::vector<const Bench*>& benches() {
    static std::vector<const Bench*> all;
    return all;
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::ranges::sort(values);
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Pair interleaved(int rounds, const std::function<double()>& value, const std::function<double()>& baseline) {
    std::vector<double> values;
    std::vector<double> baselines;
    for (int i = 0; i < rounds; ++i) {
        values.push_back(value());
        baselines.push_back(baseline());
    }
    return {median(values), median(baselines)};
}

void print(const Records& records) {
    for (const Record& each : records) {
        if (each.baseline.empty())
            std::printf("  %-44s %12.3f %-8s\n", each.name.c_str(), each.value, each.unit.c_str());
        else
            std::printf("  %-44s %12.3f %-8s %8.2f x  %s (%.3f %s)\n", each.name.c_str(), each.value, each.unit.c_str(),
                        each.ratio(), each.baseline.c_str(), each.baseline_value, each.unit.c_str());
    }
    std::fflush(stdout);
}

void write_json(const Records& records, const std::string& file) {
    boost::json::array rows;
    for (const Record& each : records)
        rows.push_back({{"name", each.name},
                        {"value", each.value},
                        {"unit", each.unit},
                        {"baseline", each.baseline},
                        {"baseline_value", each.baseline_value},
                        {"ratio", each.ratio()}});
    std::ofstream{file} << boost::json::serialize(rows) << "\n";
}

}  // namespace bulkhead::bench
