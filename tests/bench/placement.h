#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <vector>

#include "tests/support/cpus.h"

namespace bulkhead::bench {

using test::allowed_cpus;

/// Where the two sides of an exchange run. Waking a CPU that sleeps can take longer than all the
/// rest: left alone, the scheduler chooses between the other two from request to request.
enum class On { any_cpu, one_cpu, two_cpus };

/// Keeps processes on CPUs of this one: the client's side on the first, the server's there or on
/// the second. Its end frees this process.
class Placement {
public:
    explicit Placement(On on) : on_{on}, all_{allowed_cpus()} {}
    ~Placement() { test::keep_on(all_, ::getpid()); }
    Placement(const Placement&) = delete;
    Placement& operator=(const Placement&) = delete;

    [[nodiscard]] bool possible() const { return on_ != On::two_cpus || all_.size() >= 2; }
    void client(pid_t pid) const { test::keep_on(on_ == On::any_cpu ? all_ : std::vector{all_[0]}, pid); }
    void server(pid_t pid) const {
        test::keep_on(on_ == On::any_cpu ? all_ : std::vector{all_[on_ == On::one_cpu ? 0 : 1]}, pid);
    }

private:
    On on_;
    std::vector<int> all_;
};

}  // namespace bulkhead::bench
