#include "supervisor/states/restart_policy.h"

#include <algorithm>
#include <utility>

#include "supervisor/base/limits.h"

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
        if (unforgiven == 0) credit = Millis{0};  // no credit for future crashes
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

/// Credit towards the next forgiveness is kept as ready time before the last crash.
void CrashHistory::add(Millis ready_for) {
    ready_before.push_back(ready_for);
    const Tally now = tally(*this);
    ready_before.assign(now.unforgiven, Millis{0});
    ready_before.back() = now.credit;
}

Millis CrashHistory::withdraw(std::size_t count) {
    Millis ready{};
    for (; count > 0 && !ready_before.empty(); --count) {
        ready += ready_before.back();
        ready_before.pop_back();
    }
    return ready;
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

void RestartPolicy::lifted() {
    crashes.clear();
    blame_ = {};
}

RestartDecision RestartPolicy::ended(const End& end, Time now, double jitter) {
    const RestartDecision stopped{
        WorkerEvent::reclaimed, now, {}, unforgiven_crashes(crashes, blame_.ready_before_withdrawn)};
    switch (end.how) {
    case Ending::asked: return stopped;
    case Ending::gpu_refused:
        if (!is_wanted(end)) return stopped;
        return {WorkerEvent::restart_planned, now + limits::gpu_retry, limits::gpu_retry, stopped.unforgiven};
    case Ending::hopeless: return {WorkerEvent::gave_up, now, {}, stopped.unforgiven};
    case Ending::gpu_failed:
        return is_wanted(end) ? RestartDecision{WorkerEvent::restart_planned, now, {}, stopped.unforgiven} : stopped;
    case Ending::load_failed:
        if (!keep_running) return stopped;
        break;
    case Ending::crashed: break;
    }
    crashes.add(end.ready_for + std::exchange(blame_.ready_before_withdrawn, {}));
    auto& on_gpu = blame_.on_gpu;
    if (on_gpu.size() == limits::restart_unforgiven_max) on_gpu.erase(on_gpu.begin());
    on_gpu.push_back({end.gpu_uuid, now});

    RestartDecision decision;
    decision.unforgiven = unforgiven_crashes(crashes);
    if (decision.unforgiven >= limits::restart_unforgiven_max) {
        blame_.gave_up_by_count = true;
        decision.event = WorkerEvent::gave_up;
    } else if (is_wanted(end)) {
        const double scale = 1.0 + limits::restart_jitter * std::clamp(jitter, -1.0, 1.0);
        decision.event = WorkerEvent::restart_planned;
        decision.delay =
            Millis{static_cast<Millis::rep>(static_cast<double>(restart_delay(decision.unforgiven).count()) * scale)};
    } else {
        decision.event = WorkerEvent::reclaimed;
    }
    decision.spawn_at = now + decision.delay;
    return decision;
}

bool RestartPolicy::gpu_quarantined(const std::string& uuid, Time now) {
    auto& [gave_up_by_count, ready_before_withdrawn, on_gpu] = blame_;
    std::size_t blamed = 0;
    while (!on_gpu.empty() && on_gpu.back().uuid == uuid && now - on_gpu.back().at <= limits::gpu_failures_window) {
        on_gpu.pop_back();
        ++blamed;
    }
    ready_before_withdrawn += crashes.withdraw(blamed);
    if (!gave_up_by_count || unforgiven_crashes(crashes, ready_before_withdrawn) >= limits::restart_unforgiven_max)
        return false;
    gave_up_by_count = false;
    return true;
}

/// Crashes are withdrawn from the last one backwards: drops those before one that is too old
/// or was on a CPU.
RestartPolicy::Blame RestartPolicy::blame(Time now) const {
    Blame result = blame_;
    auto& on_gpu = result.on_gpu;
    const auto last_kept = std::find_if(on_gpu.rbegin(), on_gpu.rend(), [&](const GpuCrash& crash) {
        return crash.uuid.empty() || now - crash.at > limits::gpu_failures_window;
    });
    on_gpu.erase(on_gpu.begin(), last_kept.base());
    return result;
}

}  // namespace bulkhead::supervisor
