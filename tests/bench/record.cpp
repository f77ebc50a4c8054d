#include "tests/bench/record.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

#include <boost/json.hpp>

namespace bulkhead::bench {

Bench::Bench(std::string bench_name, std::string what, std::function<Records()> body, Prints who)
    : name{std::move(bench_name)}, description{std::move(what)}, run{std::move(body)}, prints{who} {
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

double percentile(std::vector<double> values, double of) {
    const auto count = static_cast<double>(values.size());
    if (count * (1 - of) < 1 - 1e-9) return std::numeric_limits<double>::quiet_NaN();
    const auto rank = static_cast<std::ptrdiff_t>(std::ceil(of * count - 1e-9)) - 1;
    std::ranges::nth_element(values, values.begin() + std::max<std::ptrdiff_t>(rank, 0));
    return values[static_cast<std::size_t>(std::max<std::ptrdiff_t>(rank, 0))];
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
