// A supervisor is killed: how long until its successor has adopted every worker and answers.

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <vector>

#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::adoption_bench {
namespace {

constexpr int workers = 30;
constexpr int rounds = 100;  ///< the fewest that have a p99

/// A daemon with `workers` models of the minimal worker.
struct Fleet {
    static test::SpawnOptions options() {
        test::SpawnOptions options;
        options.programs = test::minimal_programs();
        return options;
    }
    static std::string yaml() {
        std::string text = test::fleet({});
        for (int i = 0; i < workers; ++i) text += test::minimal_model("m" + std::to_string(i));
        return text;
    }
    test::Daemon daemon{yaml(), options()};
};

/// Milliseconds from SIGKILL until `fleet.status` of the next supervisor shows nobody
/// in `adopting`.
double succession_ms(const test::Daemon& daemon) {
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());
    ::poll(nullptr, 0, 1'100);  // it has settled: the keeper starts the next one without delay
    return microseconds([&] {
               ::kill(supervisor, SIGKILL);
               for (bool all_adopted = false; !all_adopted;) {
                   const auto status = daemon.call("fleet.status").value();
                   all_adopted = std::ranges::none_of(status.at("models").as_array(), [](const auto& row) {
                       return row.at("state").as_string() == "adopting";
                   });
               }
           }) /
           1000;
}

Records adoption() {
    Fleet loaded;
    Fleet empty;
    (void)loaded.daemon.call("model.load", {{"all", true}}).value();
    std::vector<double> with_workers;
    std::vector<double> without;
    for (int i = 0; i < rounds; ++i) {
        with_workers.push_back(succession_ms(loaded.daemon));
        without.push_back(succession_ms(empty.daemon));
    }
    const std::string baseline = "the same with nothing to adopt";
    return {{"SIGKILL of the supervisor to 30 adopted, median", median(with_workers), "ms", baseline, median(without)},
            {"SIGKILL of the supervisor to 30 adopted, p99 of 100", percentile(with_workers, 0.99), "ms", "goal", 50}};
}

const Bench adoption_bench{"adoption", "a killed supervisor: until the next one has adopted 30 workers", adoption};

}  // namespace
}  // namespace bulkhead::bench::adoption_bench
