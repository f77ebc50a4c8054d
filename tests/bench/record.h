#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace bulkhead::bench {

/// One line of the table: a quantity beside a baseline that was measured in the same run.
struct Record {
    std::string name;
    double value = 0;
    std::string unit;
    std::string baseline;
    double baseline_value = 0;
    [[nodiscard]] double ratio() const { return baseline_value == 0 ? 0 : value / baseline_value; }
};

using Records = std::vector<Record>;

/// A named group of measurements; registered by a static object of its file.
struct Bench {
    enum class Prints { records, itself };  ///< the latter: a table of its own, the records are
                                            ///< for --json alone
    Bench(std::string bench_name, std::string what, std::function<Records()> body, Prints who = Prints::records);
    std::string name;
    std::string description;
    std::function<Records()> run;
    Prints prints;
};
[[nodiscard]] std::vector<const Bench*>& benches();

using Clock = std::chrono::steady_clock;
template <typename Body>
double microseconds(Body&& body) {
    const auto start = Clock::now();
    body();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

[[nodiscard]] double median(std::vector<double> values);
/// `of` from 0 to 1, nearest rank. NaN where so few values say nothing about it: fewer
/// than 1 / (1 - of).
[[nodiscard]] double percentile(std::vector<double> values, double of);

/// Runs two bodies in turn and returns the medians of each: the machine's speed drifts, a pair's
/// ratio less. Each body returns the microseconds of one operation.
struct Pair {
    double value;
    double baseline;
};
[[nodiscard]] Pair interleaved(int rounds, const std::function<double()>& value,
                               const std::function<double()>& baseline);

void print(const Records& records);
void write_json(const Records& records, const std::string& file);

}  // namespace bulkhead::bench
