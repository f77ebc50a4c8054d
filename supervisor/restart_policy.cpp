#include "supervisor/restart_policy.h"

#include <algorithm>

#include "supervisor/limits.h"

namespace bulkhead::supervisor {
namespace {

struct Tally {
    std::uint32_t unforgiven = 0;
    Millis credit{};

    void ready(Millis duration) {
        credit += duration;
        while (unforgiven > 0 && credit >= limits::restart_forgiven_per) {
            credit -= limits::restart_forgiven_per;
            --unforgiven;
        }
        if (unforgiven == 0) credit = Millis{0};  // readiness is not saved up for crashes to come
    }
};

Tally tally(const CrashHistory& history) {
    Tally result;
    for (const Millis ready_for : history.ready_before) {
        result.ready(ready_for);
        ++result.unforgiven;
    }
    return result;
}

}  // namespace

void CrashHistory::add(Millis ready_for) {
    if (unforgiven_crashes(*this, ready_for) == 0) ready_before.clear();
    // Each forgiven crash stays until all are: a bound for a history that never comes to rest.
    constexpr std::size_t crashes_kept = 1'024;
    if (ready_before.size() == crashes_kept) ready_before.erase(ready_before.begin());
    ready_before.push_back(ready_for);
}

std::uint32_t unforgiven_crashes(const CrashHistory& history, Millis ready_now) {
    Tally result = tally(history);
    result.ready(ready_now);
    return result.unforgiven;
}

Millis restart_delay(std::uint32_t unforgiven) {
    if (unforgiven <= 1) return Millis{0};
    const std::uint32_t doublings = std::min(unforgiven - 2, 16U);
    const Millis delay = Millis{limits::restart_delay_first} * (1 << doublings);
    return std::min(delay, Millis{limits::restart_delay_max});
}

RestartDecision decide_restart(const CrashHistory& history, double jitter) {
    RestartDecision decision;
    decision.unforgiven = tally(history).unforgiven;
    decision.quarantine = decision.unforgiven >= limits::restart_unforgiven_max;
    const double scale = 1.0 + limits::restart_jitter * std::clamp(jitter, -1.0, 1.0);
    decision.delay =
        Millis{static_cast<Millis::rep>(static_cast<double>(restart_delay(decision.unforgiven).count()) * scale)};
    return decision;
}

}  // namespace bulkhead::supervisor
