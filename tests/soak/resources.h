#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace bulkhead::soak {

/// What a daemon and the machine have at one moment, by name: counts, and KiB for what
/// ends in "KiB".
using Resources = std::map<std::string, std::int64_t>;

/// Of the keeper and its present supervisor (0: not looked at), of everything that carries this
/// socket in its environment, and of the places where programs leave things behind: /dev/shm,
/// $TMPDIR, cgroups.
[[nodiscard]] Resources measure(pid_t keeper, pid_t supervisor, const std::string& socket);

/// Adds what a worker has, the slabs that it maps among it.
void add_worker(Resources& all, pid_t worker);

/// Adds what these have together, and of resident sizes the largest: one that grows for
/// ever becomes it.
void add_workers(Resources& all, const std::vector<pid_t>& workers);

/// What to compare with later: measured until it stays the same for a moment, 5 s at most.
Resources measure_settled(const std::function<Resources()>& take);

/// What there is when things have come to rest: measured again for up to 5 s while anything drifts,
/// since the last process' records are given up a moment after its end was told.
[[nodiscard]] Resources measure_at_rest(const Resources& baseline, const std::function<Resources()>& take);

/// One line a resource: baseline, now, and whether that is drift. Counts must be what they were;
/// resident sizes may differ by `resident_slack_kib`, since allocators keep what they once needed.
/// Without a baseline nothing was shown, which counts as one.
/// Returns  the number of resources that drifted
int print_drift(const Resources& baseline, const Resources& now);

inline constexpr std::int64_t resident_slack_kib = 1024;

/// The only child of the keeper that runs bulkhead-supervisor; 0 while there is none, one that has
/// ended among them.
[[nodiscard]] pid_t supervisor_of(pid_t keeper);

}  // namespace bulkhead::soak
