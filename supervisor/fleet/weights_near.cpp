#include "supervisor/fleet/weights_near.h"

#include <algorithm>
#include <tuple>

#include "ipc/base/machine_memory.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::size_t threads_stuck_max = 1;  ///< threads that a hanging disk may block

}  // namespace

std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, memory::Bytes bound) {
    std::erase_if(candidates, [](const auto& one) { return one.loaded || (!one.asked && one.unloaded_ms == 0); });
    std::ranges::stable_sort(candidates, [](const auto& a, const auto& b) {
        return std::tuple{a.asked, a.unloaded_ms} > std::tuple{b.asked, b.unloaded_ms};
    });
    std::vector<std::string> chosen;
    for (const NearCandidate& one : candidates) {
        if (one.bytes > bound) continue;
        bound -= one.bytes;
        chosen.push_back(one.model);
    }
    return chosen;
}

WeightsNear::WeightsNear(boost::asio::io_context& io, const config::Fleet& fleet, std::filesystem::path package_cache,
                         Candidates candidates)
    : fleet_{fleet}, package_cache_{std::move(package_cache)}, candidates_{std::move(candidates)},
      next_look_{io}, disk_{io, limits::off_loop_job_deadline, threads_stuck_max} {}

std::optional<bool> WeightsNear::is_near(const std::string& model) const {
    const auto found = seen_.find(model);
    if (found == seen_.end() || found->second.bytes == 0) return std::nullopt;
    return found->second.cached == found->second.bytes;
}

bool WeightsNear::end() { return disk_.end(limits::near_end_patience); }

void WeightsNear::look() {
    if (fleet_.near_bytes == 0) return;
    disk_.run(
        "keeping weights in the page cache",
        [candidates = candidates_(), models = fleet_.models, bound = fleet_.near_bytes,
         cache = package_cache_]() mutable {
            Seen seen;
            std::map<std::string, std::vector<std::filesystem::path>> files;
            for (std::size_t i = 0; i < models.size(); ++i) {
                const std::string& model = models[i].name;
                files[model] = weight_files(models[i], cache);
                seen[model] = read_ahead(files[model], 0);
                candidates[i].bytes = seen[model].bytes;
            }
            bound = std::min(bound, read_machine_memory().available / 2);
            std::uint64_t left = limits::near_read_max;
            for (const std::string& model : choose_near(std::move(candidates), bound)) {
                const std::uint64_t missing = seen[model].bytes - seen[model].cached;
                if (missing > 0) (void)read_ahead(files[model], left);
                left -= std::min(left, missing);
            }
            return std::pair{std::move(seen), left == 0};
        },
        [this](Result<std::pair<Seen, bool>> looked) {
            if (looked) seen_ = std::move(looked->first);
            const bool is_more = looked && looked->second;
            next_look_.arm(is_more ? limits::near_look_while_reading : limits::near_look_every, [this] { look(); });
        });
}

}  // namespace bulkhead::supervisor
